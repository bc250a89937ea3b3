"""LangChain, which many applications use in place of the vendors' packages.

Skipped where it is not installed: `pip install langchain-openai` takes 50 s.
"""

import sys
import unittest
from typing import Annotated

try:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings
except ImportError:
    print("langchain-openai is not installed, so LangChain was not tried")
    sys.exit()

from pydantic import BaseModel, Field

from shared import KEY, ROOT

import openai

MODEL = openai.OpenAI(base_url=ROOT + "/v1", api_key=KEY).models.list().data[0].id
QUESTION = "What is a rank?"


def model(**fields):
    return ChatOpenAI(base_url=ROOT + "/v1", api_key=KEY, model=MODEL, max_retries=0, timeout=120, temperature=0, **fields)


# Without bounds and `strict`, a small model may write digits and further fields until the answer is
# full.
Small = Annotated[int, Field(ge=0, le=99)]


@tool
def add(a: Small, b: Small) -> int:
    """Adds two numbers."""
    return a + b


class Ranks(BaseModel):
    count: int
    names: list[str]


class LangChain(unittest.TestCase):
    def test_a_stream_is_the_whole_answer(self):
        whole = model(max_tokens=30).invoke(QUESTION)
        self.assertTrue(whole.content)
        parts = list(model(max_tokens=30, stream_usage=True).stream(QUESTION))
        self.assertEqual("".join(part.content for part in parts), whole.content)
        usage = [part.usage_metadata for part in parts if part.usage_metadata]
        self.assertEqual(usage[-1]["output_tokens"], whole.usage_metadata["output_tokens"])

    def test_tools_there_and_back(self):
        messages = [HumanMessage("Use a tool.")]
        answer = model(max_tokens=200).bind_tools([add], tool_choice="add", strict=True).invoke(messages)
        self.assertEqual([call["name"] for call in answer.tool_calls], ["add"])
        messages.append(answer)
        for call in answer.tool_calls:
            messages.append(ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"]))
        self.assertIsInstance(model(max_tokens=20).invoke(messages).content, str)

    def test_structured_output(self):
        for method in ("json_schema", "function_calling"):
            form = model(max_tokens=400).with_structured_output(Ranks, method=method, include_raw=True)
            answer = form.invoke(QUESTION)
            # A small model may fill the answer's length before its list ends.
            whole = answer["raw"].response_metadata["finish_reason"] != "length"
            self.assertTrue(isinstance(answer["parsed"], Ranks) or not whole, answer)

    def test_the_responses_api(self):
        answer = model(max_tokens=30, use_responses_api=True).invoke(QUESTION)
        self.assertEqual(answer.text, model(max_tokens=30).invoke(QUESTION).text)

    def test_a_batch(self):
        questions = ["What is a rank?", "What is a shard?", "What is decode?"]
        alone = [model(max_tokens=12).invoke(question).content for question in questions]
        self.assertEqual([one.content for one in model(max_tokens=12).batch(questions)], alone)

    def test_embeddings(self):
        embeddings = OpenAIEmbeddings(base_url=ROOT + "/v1", api_key=KEY, model=MODEL, check_embedding_ctx_length=False)
        vectors = embeddings.embed_documents(["a rank", "a shard"])
        self.assertEqual(len(vectors[0]), len(embeddings.embed_query("a rank")))
        self.assertNotEqual(vectors[0], vectors[1])


if __name__ == "__main__":
    unittest.main()
