"""OpenAI's Responses API, and tokens, through the official `openai` package."""

import json
import unittest
import urllib.request

import openai

from shared import KEY, ROOT, SCHEMAS, check, run_tool

client = openai.OpenAI(base_url=ROOT + "/v1", api_key=KEY, max_retries=0, timeout=120)
MODEL = client.models.list().data[0].id
TOOLS = [
    {"type": "function", "name": name, "description": name, "parameters": schema, "strict": True}
    for name, schema in SCHEMAS.items()
]
QUESTION = "What is tensor parallelism?"


def create(**fields):
    return client.responses.create(**({"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 60} | fields))


class Responses(unittest.TestCase):
    def test_answer_is_chats(self):
        response = create()
        chat = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=60)
        self.assertEqual(response.output_text, chat.choices[0].message.content)
        self.assertEqual(response.usage.input_tokens, chat.usage.prompt_tokens)
        self.assertIn(response.status, ("completed", "incomplete"))

    def test_stream_is_the_whole_answer(self):
        whole = create()
        text, last = "", None
        for event in create(stream=True):
            if event.type == "response.output_text.delta":
                text += event.delta
            last = event
        self.assertEqual(text, whole.output_text)
        self.assertEqual(last.response.output_text, whole.output_text)
        self.assertEqual(last.type, "response." + last.response.status)

    def test_conversations_go_on(self):
        first = create()
        second = create(input="And pipelines?", previous_response_id=first.id)
        self.assertGreater(second.usage.input_tokens, first.usage.input_tokens)
        same = create(input=[{"role": "user", "content": QUESTION}, *first.output,
                             {"role": "user", "content": "And pipelines?"}])
        self.assertEqual(same.output_text, second.output_text)
        self.assertEqual(client.responses.retrieve(second.id).output_text, second.output_text)
        client.responses.delete(second.id)
        with self.assertRaises(openai.NotFoundError):
            create(previous_response_id=second.id)

    def test_calls(self):
        response = create(tools=TOOLS, tool_choice="required", max_output_tokens=200)
        calls = [item for item in response.output if item.type == "function_call"]
        self.assertTrue(calls)
        results = []
        for call in calls:
            arguments = json.loads(call.arguments)
            check(call.name, arguments)
            results.append({"type": "function_call_output", "call_id": call.call_id, "output": run_tool(call.name, arguments)})
        final = create(input=results, previous_response_id=response.id, tools=TOOLS, tool_choice="none")
        self.assertEqual([item.type for item in final.output], ["message"])

    def test_calls_in_a_stream(self):
        arguments, done = "", None
        for event in create(tools=TOOLS, tool_choice={"type": "function", "name": "add"}, stream=True, max_output_tokens=200):
            if event.type == "response.function_call_arguments.delta":
                arguments += event.delta
            if event.type == "response.function_call_arguments.done":
                done = event.arguments
        self.assertEqual(arguments, done)
        check("add", json.loads(done))

    def test_structured_output(self):
        form = {"type": "json_schema", "name": "weather", "strict": True, "schema": SCHEMAS["weather"]}
        check("weather", json.loads(create(text={"format": form}, max_output_tokens=100).output_text))

    def test_log_probabilities(self):
        response = create(include=["message.output_text.logprobs"], top_logprobs=2)
        part = response.output[0].content[0]
        self.assertTrue(part.logprobs)
        self.assertEqual({len(token.top_logprobs) for token in part.logprobs}, {2})
        self.assertTrue(all(token.logprob <= 0 for token in part.logprobs))

    def test_custom_tools(self):
        form = {"type": "grammar", "syntax": "regex", "definition": "[a-z]{3,9}"}
        tools = [{"type": "custom", "name": "say", "description": "Says a word", "format": form}, {"type": "web_search"}]
        response = create(tools=tools, tool_choice={"type": "custom", "name": "say"}, max_output_tokens=100)
        call = response.output[0]
        self.assertEqual((call.type, call.name), ("custom_tool_call", "say"))
        self.assertRegex(call.input, "^[a-z]{3,9}$")
        self.assertEqual(len(response.tools), 1)
        result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "said"}
        self.assertTrue(create(input=[result], previous_response_id=response.id).output_text)

    def test_errors_name_the_field(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            create(extra_body={"background": True})
        self.assertEqual(caught.exception.param, "background")


class Tokens(unittest.TestCase):
    def post(self, path, body):
        headers = {"Content-Type": "application/json", "Authorization": "Bearer " + KEY}
        request = urllib.request.Request(ROOT + path, json.dumps(body).encode(), headers)
        return json.load(urllib.request.urlopen(request, timeout=30))

    def test_there_and_back(self):
        text = "What is a rank?"
        tokens = self.post("/tokenize", {"prompt": text})
        self.assertEqual(tokens["count"], len(tokens["tokens"]))
        self.assertEqual(self.post("/detokenize", {"tokens": tokens["tokens"]})["prompt"], text)

    def test_messages_are_counted_as_they_are_read(self):
        counted = self.post("/tokenize", {"messages": [{"role": "user", "content": QUESTION}]})
        self.assertEqual(counted["count"], create(max_output_tokens=1).usage.input_tokens)


if __name__ == "__main__":
    unittest.main()
