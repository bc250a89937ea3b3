"""Anthropic's API through the official `anthropic` package."""

import unittest

import anthropic

from shared import KEY, ROOT, SCHEMAS, check, run_tool

client = anthropic.Anthropic(base_url=ROOT, api_key=KEY, max_retries=0, timeout=120)
MODEL = "default"
TOOLS = [{"name": name, "description": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
QUESTION = [{"role": "user", "content": "What is tensor parallelism?"}]


# The newer package no longer has this field; older ones and others' clients send it.
GREEDY = {"temperature": 0}


def create(**fields):
    fields = {"model": MODEL, "messages": QUESTION, "max_tokens": 60, "extra_body": GREEDY} | fields
    return client.messages.create(**fields)


class Messages(unittest.TestCase):
    def test_answer(self):
        message = create()
        self.assertEqual((message.type, message.role), ("message", "assistant"))
        self.assertTrue(message.id.startswith("msg"))
        self.assertEqual([block.type for block in message.content], ["text"])
        self.assertIn(message.stop_reason, ("end_turn", "max_tokens"))
        self.assertGreater(message.usage.input_tokens, 0)

    def test_stream_is_the_whole_answer(self):
        whole = create()
        with client.messages.stream(model=MODEL, messages=QUESTION, max_tokens=60, extra_body=GREEDY) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        self.assertEqual(text, whole.content[0].text)
        self.assertEqual(final.stop_reason, whole.stop_reason)
        self.assertEqual(final.usage.output_tokens, whole.usage.output_tokens)

    def test_system_and_blocks(self):
        blocks = [{"type": "text", "text": "What is tensor parallelism?", "cache_control": {"type": "ephemeral"}}]
        self.assertEqual(create(messages=[{"role": "user", "content": blocks}]).content, create().content)
        self.assertGreater(create(system="Be brief.").usage.input_tokens, create().usage.input_tokens)

    def test_max_tokens_and_stop_sequences(self):
        self.assertEqual(create(max_tokens=1).stop_reason, "max_tokens")
        text = create().content[0].text
        cut = text[len(text) // 2 :][:3]
        stopped = create(stop_sequences=["no such text", cut])
        self.assertEqual(stopped.content[0].text, text[: text.index(cut)])
        self.assertEqual((stopped.stop_reason, stopped.stop_sequence), ("stop_sequence", cut))

    def test_what_claude_code_sends(self):
        edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
        more = {"context_management": {"edits": edits}, "temperature": 0, "output_config": {"effort": "medium"}}
        self.assertEqual(create(extra_body=more, metadata={"user_id": "u"}).content, create().content)

    def test_count_tokens(self):
        counted = client.messages.count_tokens(model=MODEL, messages=QUESTION)
        self.assertEqual(counted.input_tokens, create().usage.input_tokens)
        more = client.messages.count_tokens(model=MODEL, messages=QUESTION, tools=TOOLS)
        self.assertGreater(more.input_tokens, counted.input_tokens)


class Models(unittest.TestCase):
    def test_models_have_anthropics_form(self):
        model = client.models.list().data[0]
        self.assertEqual(model.type, "model")
        self.assertTrue(model.display_name)
        self.assertGreater(model.created_at.year, 2024)


class Tools(unittest.TestCase):
    def test_an_agent_loop(self):
        messages = [{"role": "user", "content": "Use a tool."}]
        for _ in range(3):
            reply = create(messages=messages, tools=TOOLS, tool_choice={"type": "any"}, max_tokens=200)
            self.assertEqual(reply.stop_reason, "tool_use")
            messages.append({"role": "assistant", "content": reply.content})
            results = []
            for block in reply.content:
                if block.type == "tool_use":
                    check(block.name, block.input)
                    result = run_tool(block.name, block.input)
                    results.append({"type": "tool_result", "tool_use_id": block.id, "content": result})
            self.assertTrue(results)
            messages.append({"role": "user", "content": results})

    def test_a_named_tool_in_a_stream(self):
        choice = {"type": "tool", "name": "add"}
        with client.messages.stream(model=MODEL, messages=QUESTION, max_tokens=200, tools=TOOLS, tool_choice=choice) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_message()
        self.assertIn("input_json", kinds)
        self.assertEqual([(block.type, block.name) for block in final.content], [("tool_use", "add")])
        check("add", final.content[0].input)


class Errors(unittest.TestCase):
    def test_errors_have_anthropics_form(self):
        with self.assertRaises(anthropic.BadRequestError) as caught:
            create(extra_body={"mood": 1})
        self.assertEqual(caught.exception.body["type"], "error")
        self.assertEqual(caught.exception.body["error"]["type"], "invalid_request_error")
        self.assertIn("`mood`", caught.exception.body["error"]["message"])
        edits = {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}
        with self.assertRaises(anthropic.BadRequestError) as caught:
            create(extra_body=edits)
        self.assertIn("context_management.edits[0].type", caught.exception.body["error"]["message"])
        with self.assertRaises(anthropic.NotFoundError):
            create(model="claude-9")


if __name__ == "__main__":
    unittest.main()
