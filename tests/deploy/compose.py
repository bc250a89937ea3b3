#!/usr/bin/env python3
"""compose.yaml follows the Compose Specification, and this check can fail.

    tests/deploy/compose.py

compose_spec.json is the specification's JSON schema as docker-compose 1.29.2 (PyPI, Apache-2.0) has it.
"""

import copy
import json
from pathlib import Path

import jsonschema
import yaml

HERE = Path(__file__).resolve().parent
SCHEMA = jsonschema.Draft7Validator(json.loads((HERE / "compose_spec.json").read_text()))
FILE = yaml.safe_load((HERE.parents[1] / "compose.yaml").read_text())

for error in SCHEMA.iter_errors(FILE):
    raise SystemExit(f"compose.yaml: {'.'.join(map(str, error.absolute_path))}: {error.message}")
for place, wrong in [("shm_sise", "1g"), ("ports", "8000:8000"), ("stop_grace_period", 40), ("ulimits", {"nofile": "many"})]:
    damaged = copy.deepcopy(FILE)
    damaged["services"]["thunder"][place] = wrong
    assert not SCHEMA.is_valid(damaged), f"{place}: {wrong} is taken"
volumes = {str(mount).split(":")[0] for service in FILE["services"].values() for mount in service["volumes"]}
unknown = {name for name in volumes if not name.startswith(".")} ^ set(FILE["volumes"])
assert not unknown, f"volumes that are declared or used alone: {unknown}"
print("compose.yaml: right")
