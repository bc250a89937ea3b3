"""Twenty scripted tasks of a coding agent against a mock of its tools, through the three APIs that agents use.

The built-in model is small: a step's script says which tools it may call, and the grammar makes the calls right.
Each task's transcript must be the one in transcripts/, where README.md says how those were made. What a run writes lies
in THUNDER_TRANSCRIPTS, else in target/transcripts.
"""

import json
import os
import pathlib
import re
import unittest

import anthropic
import openai

from shared import KEY, ROOT

KEPT = pathlib.Path(__file__).parent / "transcripts"
FOLDER = pathlib.Path(os.environ.get("THUNDER_TRANSCRIPTS", "target/transcripts"))
FILES = {"main.rs": "fn main() { prinln!(); }", "lib.rs": "pub fn add() {}", "notes.md": "todo"}
PATH = {"type": "string", "enum": sorted(FILES)}


def tool(**properties):
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


TOOLS = {
    "list_files": tool(),
    "read_file": tool(path=PATH),
    "edit_file": tool(path=PATH, text={"type": "string", "enum": ["fn main() {}", "done", "pub fn sub() {}"]}),
    "search": tool(word={"type": "string", "enum": ["main", "add", "todo"]}, most={"type": "integer", "minimum": 1, "maximum": 3}),
    "run_tests": tool(fast={"type": "boolean"}),
}
STEPS = [
    ["list_files"],
    ["read_file"],
    ["list_files", "read_file"],
    ["search", "read_file", "edit_file"],
    ["read_file", "edit_file", "run_tests"],
    ["edit_file", "run_tests"],
    ["search", "*"],
    ["*", "*", "run_tests"],
    ["read_file", "read_file", "edit_file", "edit_file", "run_tests"],
    ["*", "*", "*", "*"],
]


class Desk:
    """The files that a task works on."""

    def __init__(self):
        self.files = dict(FILES)

    def run(self, name, arguments):
        schema = TOOLS[name]["properties"]
        assert set(arguments) == set(schema), (name, arguments)
        for key, value in arguments.items():
            assert value in schema[key].get("enum", [value]), (name, arguments)
        match name:
            case "list_files":
                return " ".join(sorted(self.files))
            case "read_file":
                return self.files[arguments["path"]]
            case "edit_file":
                self.files[arguments["path"]] = arguments["text"]
                return "written"
            case "search":
                found = [name for name, text in self.files.items() if arguments["word"] in text]
                return " ".join(found[: arguments["most"]]) or "nothing"
            case "run_tests":
                return "1 failed" if "prinln" in self.files["main.rs"] else "all passed"


class Chat:
    """OpenAI's chat completions, streamed or whole."""

    client = openai.OpenAI(base_url=ROOT + "/v1", api_key=KEY, max_retries=0, timeout=120)
    model = client.models.list().data[0].id
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()]

    def __init__(self, task, seed, stream):
        self.messages = [{"role": "user", "content": task}]
        self.fields = {"model": self.model, "tools": self.tools, "seed": seed, "temperature": 0.8, "parallel_tool_calls": False}
        self.stream = stream

    def answer(self, choice):
        fields = self.fields | {"messages": self.messages, "tool_choice": choice, "max_tokens": 200 if choice != "none" else 20}
        if self.stream:
            content, calls = self.streamed(fields)
        else:
            message = self.client.chat.completions.create(**fields).choices[0].message
            content = message.content
            calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or []]
        self.messages.append({"role": "assistant", "content": content} | ({"tool_calls": [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}} for id, name, arguments in calls
        ]} if calls else {}))
        return content, calls

    def streamed(self, fields):
        content, calls = "", {}
        for chunk in self.client.chat.completions.create(**fields, stream=True):
            delta = chunk.choices[0].delta if chunk.choices else None
            content += (delta and delta.content) or ""
            for part in (delta and delta.tool_calls) or []:
                before = calls.get(part.index, ("", "", ""))
                new = (part.id or "", part.function.name or "", part.function.arguments or "")
                calls[part.index] = tuple(old + more for old, more in zip(before, new))
        return content, list(calls.values())

    def step(self, wanted, desk):
        choice = "required" if wanted == "*" else {"type": "function", "function": {"name": wanted}}
        called = []
        for id, name, arguments in self.answer(choice)[1]:
            called.append(name)
            self.messages.append({"role": "tool", "tool_call_id": id, "content": desk.run(name, json.loads(arguments))})
        return called

    def end(self):
        content, calls = self.answer("none")
        assert not calls
        return content


class Responses:
    """OpenAI's responses; the server keeps the conversation."""

    tools = [{"type": "function", "name": name, "parameters": schema, "strict": True} for name, schema in TOOLS.items()]

    def __init__(self, task, seed, stream):
        self.messages, self.new, self.before = [], [{"role": "user", "content": task}], None

    def answer(self, choice):
        self.messages += self.new
        response = Chat.client.responses.create(
            model=Chat.model, input=self.new, previous_response_id=self.before, tools=self.tools, tool_choice=choice,
            parallel_tool_calls=False, temperature=0, max_output_tokens=200 if choice != "none" else 20)
        self.before, self.new = response.id, []
        self.messages += [item.model_dump(exclude_none=True) for item in response.output]
        return response

    def step(self, wanted, desk):
        choice = "required" if wanted == "*" else {"type": "function", "name": wanted}
        calls = [item for item in self.answer(choice).output if item.type == "function_call"]
        for call in calls:
            result = desk.run(call.name, json.loads(call.arguments))
            self.new.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        return [call.name for call in calls]

    def end(self):
        response = self.answer("none")
        assert all(item.type != "function_call" for item in response.output)
        return response.output_text


class Messages:
    """Anthropic's messages, streamed."""

    client = anthropic.Anthropic(base_url=ROOT, api_key=KEY, max_retries=0, timeout=120)
    tools = [{"name": name, "description": name, "input_schema": schema} for name, schema in TOOLS.items()]

    def __init__(self, task, seed, stream):
        self.messages = [{"role": "user", "content": task}]

    def answer(self, choice):
        limit = 200 if choice["type"] != "none" else 20
        with self.client.messages.stream(model=Chat.model, messages=self.messages, tools=self.tools, tool_choice=choice,
                                         max_tokens=limit, extra_body={"temperature": 0}) as events:
            message = events.get_final_message()
        self.messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]})
        return message.content

    def step(self, wanted, desk):
        choice = {"type": "any"} if wanted == "*" else {"type": "tool", "name": wanted}
        choice["disable_parallel_tool_use"] = True
        calls = [block for block in self.answer(choice) if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": desk.run(call.name, call.input)} for call in calls]
        self.messages.append({"role": "user", "content": results})
        return [call.name for call in calls]

    def end(self):
        blocks = self.answer({"type": "none"})
        assert all(block.type == "text" for block in blocks)
        return "".join(block.text for block in blocks)


def numbered(transcript):
    """The transcript as JSON, with its random ids numbered in the order in which they come."""
    ids = {}
    text = json.dumps(transcript, indent=1, default=str, ensure_ascii=False) + "\n"
    return re.sub(r'"(?:[a-z]+_)+[0-9a-f]{32}(?:_[0-9]+)?"', lambda match: ids.setdefault(match[0], f'"id-{len(ids) + 1}"'), text)


class Tasks(unittest.TestCase):
    maxDiff = None

    def test_twenty_tasks(self):
        FOLDER.mkdir(parents=True, exist_ok=True)
        apis = [(Chat, False), (Chat, True), (Responses, False), (Messages, True)]
        for task in range(20):
            (api, stream), steps, desk = apis[task % 4], STEPS[task % len(STEPS)], Desk()
            agent = api(f"Task {task}: mend main.rs with your tools.", task, stream)
            called = []
            for wanted in steps:
                names = agent.step(wanted, desk)
                self.assertEqual(len(names), 1, (task, wanted, names))
                self.assertTrue(wanted in ("*", names[0]), (task, wanted, names))
                called += names
            final = agent.end()
            transcript = {"api": api.__name__, "stream": stream, "script": steps, "called": called, "final": final,
                          "files": desk.files, "messages": agent.messages}
            name, text = f"task-{task:02}.json", numbered(transcript)
            (FOLDER / name).write_text(text)
            with self.subTest(name):
                self.assertEqual(text, (KEPT / name).read_text(), "another transcript: see transcripts/README.md")


if __name__ == "__main__":
    unittest.main()
