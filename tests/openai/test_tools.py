"""Tools, structured output and thinking through the official `openai` package.

The built-in model is small: calls are demanded, and the grammar makes them right.
"""

import json
import re
import unittest

import openai

from shared import KEY, ROOT, SCHEMAS, check

client = openai.OpenAI(base_url=ROOT + "/v1", api_key=KEY, max_retries=0, timeout=120)
MODEL = client.models.list().data[0].id
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
QUESTION = [{"role": "user", "content": "What is a rank?"}]


def chat(**fields):
    return client.chat.completions.create(**({"model": MODEL, "messages": QUESTION, "max_tokens": 200} | fields))


class Calls(unittest.TestCase):
    def test_required_calls_follow_their_schemas(self):
        for seed in range(4):
            choice = chat(tools=TOOLS, tool_choice="required", temperature=1.0, seed=seed).choices[0]
            self.assertEqual(choice.finish_reason, "tool_calls")
            self.assertGreaterEqual(len(choice.message.tool_calls), 1)
            for call in choice.message.tool_calls:
                check(call.function.name, json.loads(call.function.arguments))

    def test_a_named_tool_is_called_once(self):
        named = {"type": "function", "function": {"name": "add"}}
        message = chat(tools=TOOLS, tool_choice=named).choices[0].message
        self.assertEqual([call.function.name for call in message.tool_calls], ["add"])
        self.assertIsNone(message.content)

    def test_a_stream_is_the_whole_answer(self):
        fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
        whole = chat(**fields).choices[0].message.tool_calls[0]
        name, arguments, reasons = "", "", []
        for chunk in chat(stream=True, **fields):
            delta = chunk.choices[0].delta
            for call in delta.tool_calls or []:
                name += call.function.name or ""
                arguments += call.function.arguments or ""
            reasons.append(chunk.choices[0].finish_reason)
        self.assertEqual((name, arguments), (whole.function.name, whole.function.arguments))
        self.assertEqual(reasons[-1], "tool_calls")

    def test_auto_and_none_leave_the_answer_alone(self):
        plain = chat(temperature=0).choices[0]
        none = chat(temperature=0, tools=TOOLS, tool_choice="none").choices[0]
        self.assertEqual(none.message.content, plain.message.content)
        auto = chat(temperature=0, tools=TOOLS).choices[0]
        self.assertTrue(auto.message.content or auto.message.tool_calls)

    def test_strict_tools_follow_their_schema_if_they_are_called(self):
        strict = [tool | {"function": tool["function"] | {"strict": True}} for tool in TOOLS]
        for seed in range(3):
            message = chat(tools=strict, temperature=1.0, seed=seed).choices[0].message
            for call in message.tool_calls or []:
                check(call.function.name, json.loads(call.function.arguments))

    def test_a_form_and_tools_together_give_one_of_them(self):
        form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMAS["weather"]}}
        kinds = set()
        for seed in range(6):
            message = chat(tools=TOOLS, response_format=form, temperature=1.5, seed=seed).choices[0].message
            for call in message.tool_calls or []:
                check(call.function.name, json.loads(call.function.arguments))
            if message.content:
                check("weather", json.loads(message.content))
            kinds.add(bool(message.content))
            self.assertNotEqual(bool(message.content), bool(message.tool_calls))
        self.assertLessEqual(kinds, {True, False})


class Structured(unittest.TestCase):
    def test_json_schema(self):
        schema = {
            "type": "object", "required": ["name", "age", "tags"], "additionalProperties": False,
            "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
                           "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}},
        }
        form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}}
        for seed in range(3):
            choice = chat(response_format=form, temperature=1.0, seed=seed).choices[0]
            self.assertEqual(choice.finish_reason, "stop")
            value = json.loads(choice.message.content)
            self.assertEqual(set(value), {"name", "age", "tags"})
            self.assertTrue(0 <= value["age"] <= 120 and len(value["name"]) <= 10 and set(value["tags"]) <= {"a", "b"})

    def test_pydantic_through_parse(self):
        import pydantic

        class Answer(pydantic.BaseModel):
            yes: bool
            score: int = pydantic.Field(ge=0, le=9)

        parsed = client.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=Answer, max_tokens=60)
        self.assertIsInstance(parsed.choices[0].message.parsed, Answer)

    def test_json_object_begins_as_one(self):
        text = chat(response_format={"type": "json_object"}, max_tokens=60).choices[0].message.content
        self.assertTrue(text.startswith("{"), text)

    def test_regex_choice_and_grammar(self):
        text = chat(extra_body={"guided_regex": "[0-9]{4}-[0-9]{2}"}).choices[0].message.content
        self.assertRegex(text, re.compile(r"\A[0-9]{4}-[0-9]{2}\Z"))
        text = chat(extra_body={"guided_choice": ["left", "right"]}).choices[0].message.content
        self.assertIn(text, ("left", "right"))
        text = chat(extra_body={"guided_grammar": 'start: "a" ("b" | "c")'}).choices[0].message.content
        self.assertIn(text, ("ab", "ac"))

    def test_a_bad_schema_is_named(self):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "colour"}}}
        with self.assertRaises(openai.BadRequestError) as caught:
            chat(response_format=form)
        self.assertEqual(caught.exception.param, "response_format")


if __name__ == "__main__":
    unittest.main()
