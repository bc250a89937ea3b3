"""What the tests of all clients share: the server's address, and a small agent's tools."""

import os

ROOT = os.environ.get("THUNDER_BASE_URL", "http://127.0.0.1:8000").rstrip("/").removesuffix("/v1")
KEY = os.environ.get("THUNDER_API_KEY", "none")

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "Oslo", "Lima"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": CITY, "add": ADD}


def run_tool(name, arguments):
    """The mock of the tools."""
    if name == "weather":
        return f"It is sunny in {arguments['city']} for {arguments['days']} days."
    if name == "add":
        return str(arguments["a"] + arguments["b"])
    raise AssertionError(f"no tool {name}")


def check(name, arguments):
    """Fails unless a call's arguments follow the tool's schema."""
    properties = SCHEMAS[name]["properties"]
    assert set(arguments) == set(properties), (name, arguments)
    for key, value in arguments.items():
        schema = properties[key]
        if "enum" in schema:
            assert value in schema["enum"], (key, value)
        else:
            assert isinstance(value, int) and schema["minimum"] <= value <= schema["maximum"], (key, value)
