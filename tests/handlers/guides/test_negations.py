"""What does not fit a schema comes in the order of the schema, in each process."""

import json
import os
import subprocess
import sys

# Each keyword gives one negation, all of the same size.
SCHEMA = {
    "required": ["a"],
    "allOf": [{"required": ["b"]}],
    "not": {"type": "object", "properties": {"c": False}},
}
PROGRAM = """
import json
import sys
from handlers.guides.json_schemas.negations import Negations

negations = Negations(lambda pointer: None)
print(json.dumps(negations.of(json.loads(sys.argv[1]), {})))
"""


def negations_in_a_process(hash_seed: int) -> str:
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(SCHEMA)],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return process.stdout


def test_the_order_of_negations_is_that_of_the_schema_in_each_process() -> None:
    expected = [{"type": "object", "properties": {name: False}} for name in "abc"]

    for hash_seed in range(4):
        assert json.loads(negations_in_a_process(hash_seed)) == expected
