"""`scripts/bench guides`: which schemas count as followed, and what counts as wrong."""

from __future__ import annotations

import json
import random
from pathlib import Path

from handlers.guides.compiler import GuideCompiler
from handlers.guides.process import Start
from handlers.guides.tokenizer_files import read_vocabulary
from scripts.benchmarks.guides import Findings

DEMO = "handlers/lmi_dist/demo"
VOCAB_SIZE = 1024


def test_schemas_that_are_refused_and_values_that_are_wrong_are_counted(tmp_path: Path) -> None:
    compiler = GuideCompiler(lambda: read_vocabulary(DEMO), Start(VOCAB_SIZE))
    findings = Findings()
    schemas = {"followed": {"type": "integer"}, "refused": {"type": "object", "extends": {}}}
    for name, schema in schemas.items():
        path = tmp_path / "data" / "Set" / f"{name}.json"
        tests = tmp_path / "maskbench" / "data" / f"Set---{name}.json"
        for file, content in (
            (path, schema),
            (tests, {"tests": [{"data": 5, "valid": True}, {"data": "a", "valid": False}]}),
        ):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(content))

        findings.follow(compiler, path, random.Random(1))

    compiler.close()
    assert (
        findings.num_schemas,
        findings.num_accepted,
        findings.num_valid,
        findings.num_written,
        findings.wrong,
    ) == (2, 1, 1, 1, [])
    assert (
        len(findings.compiles_s) == 1
        and findings.masks_s
        and list(findings.refusals)
        == ["must be a structure that lmi can follow: extends cannot be followed"]
    )
    assert findings.figures()["accepted"] == 0.5
