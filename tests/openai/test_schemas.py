"""Answers that follow the schemas of the JSON-Schema-Test-Suite that the server takes, each checked by jsonschema.

schemas.json is what json_schema_suite.py kept of the suite (MIT licence, Copyright (c) 2012 Julian Berman).
"""

import collections
import concurrent.futures
import json
import pathlib
import unittest

from json_schema_suite import answers

CASES = json.loads((pathlib.Path(__file__).parent / "schemas.json").read_text())


class Schemas(unittest.TestCase):
    def test_each_complete_answer_is_valid(self):
        counts = collections.Counter()
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            outcomes = pool.map(lambda case: list(answers(case["schema"], seeds=1)), CASES)
            for case, [(outcome, detail)] in zip(CASES, outcomes):
                counts[outcome] += 1
                self.assertIn(outcome, ("valid", "cut off"), f"{case['case']}: {detail}")
        print(len(CASES), "schemas,", dict(counts))
        # Else the test would say little.
        self.assertGreater(counts["valid"], 0.8 * len(CASES))


if __name__ == "__main__":
    unittest.main()
