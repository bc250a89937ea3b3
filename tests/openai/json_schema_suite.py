"""Answers that follow the schemas of the JSON-Schema-Test-Suite, each checked by the package jsonschema.

Not part of ./test: it needs the suite, which jsonschema's source package holds. test_schemas.py is a part of it: the
schemas that this series kept, with one answer each.

    pip download --no-binary :all: --no-deps jsonschema==4.26.0 && tar xzf jsonschema-4.26.0.tar.gz
    .venv/bin/pip install jsonschema==4.26.0
    THUNDER_BASE_URL=http://127.0.0.1:8000 .venv/bin/python tests/openai/json_schema_suite.py \
        jsonschema-4.26.0/json/tests/draft2020-12 [-v] [--keep tests/openai/schemas.json]

-v says why schemas are refused; --keep writes those that are accepted, for test_schemas.py. A schema that the server refuses is counted; an answer that it cut off (length) is not judged.
"""

import collections
import concurrent.futures
import glob
import json
import os
import sys

import jsonschema
import openai

from shared import KEY, ROOT

SEEDS = 4
# Where a schema leaves everything open, answers of a small model are long.
MOST_TOKENS = 600
client = openai.OpenAI(base_url=ROOT + "/v1", api_key=KEY, max_retries=0, timeout=300)


def answers(schema, seeds=SEEDS):
    """What became of the schema's answers, and an answer that is wrong, if there is one."""
    for seed in range(seeds):
        form = {"type": "json_schema", "json_schema": {"name": "case", "schema": schema}}
        try:
            choice = client.chat.completions.create(
                model="default", messages=[{"role": "user", "content": "Answer in JSON."}], response_format=form,
                max_tokens=MOST_TOKENS, temperature=1.0, seed=seed).choices[0]
        except openai.BadRequestError as error:
            yield "refused", str(error)
            return
        if choice.finish_reason == "length":
            yield "cut off", None
            continue
        try:
            jsonschema.Draft202012Validator(schema).validate(json.loads(choice.message.content))
            yield "valid", None
        except (jsonschema.ValidationError, json.JSONDecodeError) as error:
            yield "WRONG", f"{choice.message.content!r}: {str(error).splitlines()[0]}"


def main():
    cases = []
    for file in sorted(glob.glob(os.path.join(sys.argv[1], "*.json"))):
        for group in json.load(open(file)):
            if isinstance(group["schema"], dict):
                cases.append((f"{os.path.basename(file)}: {group['description']}", group["schema"]))
    counts, kept = collections.Counter(), []
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for (name, schema), outcomes in zip(cases, pool.map(lambda case: list(answers(case[1])), cases)):
            if outcomes[0][0] != "refused":
                kept.append({"case": name, "schema": schema})
            for outcome, detail in outcomes:
                counts[outcome] += 1
                if outcome == "WRONG" or outcome == "refused" and "-v" in sys.argv:
                    print(f"{outcome:8} {name}: {detail}")
    print(len(cases), "schemas,", dict(counts))
    if "--keep" in sys.argv:
        lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in kept)
        open(sys.argv[sys.argv.index("--keep") + 1], "w").write(f"[\n{lines}\n]\n")
    sys.exit(1 if counts["WRONG"] else 0)


if __name__ == "__main__":
    main()
