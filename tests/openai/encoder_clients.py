"""The official clients of OpenAI and Ollama against an encoder: `thunder serve --model tests/golden/encoders/bert`.

`./test openai` starts the server and sets THUNDER_BASE_URL.
"""

import unittest

import ollama
import openai

from shared import KEY, ROOT

client = openai.OpenAI(base_url=ROOT + "/v1", api_key=KEY, max_retries=0)
TEXTS = ["A rank of a group.", "Cats and dogs."]


class Encoder(unittest.TestCase):
    def test_openai_and_ollama_give_the_same_vectors(self):
        ours = client.embeddings.create(model="bert", input=TEXTS)
        theirs = ollama.Client(ROOT).embed("bert", TEXTS)
        self.assertEqual(ours.usage.prompt_tokens, theirs.prompt_eval_count)
        for one, other in zip(ours.data, theirs.embeddings, strict=True):
            self.assertEqual(len(one.embedding), 48)
            self.assertAlmostEqual(sum(a * b for a, b in zip(one.embedding, other, strict=True)), 1, places=5)

    def test_chat_is_refused_with_a_remedy(self):
        with self.assertRaises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="bert", messages=[{"role": "user", "content": "hello"}])
        self.assertEqual(refused.exception.code, "unsupported_model")
        self.assertIn("/v1/embeddings", str(refused.exception))
        with self.assertRaises(ollama.ResponseError) as refused:
            ollama.Client(ROOT).chat("bert", [{"role": "user", "content": "hello"}])
        self.assertIn("is an encoder", str(refused.exception))


if __name__ == "__main__":
    unittest.main()
