"""Ollama's API through the official `ollama` package."""

import json
import unittest

import ollama

from shared import KEY, ROOT, SCHEMAS, check, run_tool

client = ollama.Client(host=ROOT, headers={"Authorization": "Bearer " + KEY}, timeout=120)
MODEL = client.list().models[0].model
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
QUESTION = [{"role": "user", "content": "What is tensor parallelism?"}]
GREEDY = {"temperature": 0, "num_predict": 40}


class Chat(unittest.TestCase):
    def test_stream_is_the_whole_answer(self):
        whole = client.chat(MODEL, QUESTION, options=GREEDY)
        self.assertTrue(whole.message.content)
        self.assertTrue(whole.done)
        self.assertGreater(whole.eval_count, 0)
        parts = list(client.chat(MODEL, QUESTION, options=GREEDY, stream=True))
        self.assertEqual("".join(part.message.content for part in parts), whole.message.content)
        self.assertEqual([part.done for part in parts], [False] * (len(parts) - 1) + [True])
        self.assertEqual(parts[-1].eval_count, whole.eval_count)

    def test_a_schema_is_followed(self):
        reply = client.chat(MODEL, QUESTION, format=SCHEMAS["weather"], options={"num_predict": 100})
        check("weather", json.loads(reply.message.content))

    def test_results_of_tools_are_taken(self):
        call = {"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
        result = run_tool("add", {"a": 1, "b": 2})
        messages = QUESTION + [{"role": "assistant", "content": "", "tool_calls": [call]},
                               {"role": "tool", "tool_name": "add", "content": result}]
        reply = client.chat(MODEL, messages, tools=TOOLS, options=GREEDY)
        self.assertTrue(reply.message.content or reply.message.tool_calls)

    def test_generate(self):
        reply = client.generate(MODEL, "What is tensor parallelism?", options=GREEDY)
        self.assertEqual(reply.response, client.chat(MODEL, QUESTION, options=GREEDY).message.content)
        raw = client.generate(MODEL, "Tensor parallelism is", raw=True, options=GREEDY)
        self.assertNotEqual(raw.prompt_eval_count, reply.prompt_eval_count)


class Embeddings(unittest.TestCase):
    def test_embeddings(self):
        many = client.embed(MODEL, ["A rank.", "A cat."]).embeddings
        self.assertEqual(len(many), 2)
        one = client.embeddings(MODEL, "A rank.").embedding
        self.assertGreater(sum(a * b for a, b in zip(many[0], one)), 0.999)


class Models(unittest.TestCase):
    def test_models_are_described(self):
        model = client.list().models[0]
        self.assertGreater(model.size, 1000)
        self.assertTrue(model.details.family)
        self.assertRegex(model.details.parameter_size, "^[0-9.]+[KMB]$")
        self.assertTrue(model.details.quantization_level)

    def test_load_and_unload(self):
        self.assertEqual(client.chat(MODEL, []).done_reason, "load")
        self.assertEqual(client.chat(MODEL, [], keep_alive=0).done_reason, "unload")

    def test_show_and_ps(self):
        self.assertEqual(client.ps().models[0].model, MODEL)
        self.assertIn("completion", client.show(MODEL).capabilities)

    def test_errors(self):
        with self.assertRaises(ollama.ResponseError) as caught:
            client.chat("llama9", QUESTION)
        self.assertEqual(caught.exception.status_code, 404)
        with self.assertRaises(ollama.ResponseError) as caught:
            client.chat(MODEL, QUESTION, options={"mood": 1})
        self.assertIn("options.mood", str(caught.exception))


if __name__ == "__main__":
    unittest.main()
