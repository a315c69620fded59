"""How many real JSON schemas are followed, whether what follows them is right, and what that costs.

    scripts/bench guides FOLDER [--each 60] [--write]

FOLDER is a copy of JSONSchemaBench (guidance-ai/jsonschemabench): schemas in `data`, instances of
most, valid and not, in `maskbench/data`. A guide is compiled as an engine does it, with the process
in front. Then random walks over its masks write answers, which `jsonschema` checks.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from handlers.guides.compiler import Compiled, GuideCompiler
from handlers.guides.process import Start
from handlers.guides.vocabulary import read_config
from lmi.client.bench.figures import quantile
from lmi.errors import LmiError
from lmi.executor import GuidedDecodingConfig, GuidedDecodingParams, GuideType
from scripts.benchmarks.table import PAGE, ROOT, Goal, machine, table, write

SETS = (
    *(
        "Glaiveai2K",
        "Github_trivial",
        "Github_easy",
        "Github_medium",
        "Github_hard",
        "Github_ultra",
    ),
    *("JsonSchemaStore", "Kubernetes", "Snowplow", "WashingtonPost"),
)
NUM_WALKS = 2
MAX_TOKENS = 400
VOCAB_SIZE = 131_072
CLOSING = ('"', "}", "]", '"}', '"]', "}}", "]}", "}]")
GOALS: list[Goal] = [
    Goal("accepted", "schemas accepted, share", ">=", 0.88),
    Goal(
        "right",
        (
            "of those: every answer of two random walks is valid, no invalid instance can be written, "  # noqa: E501
            "share"
        ),
        ">=",
        1,
    ),
    Goal("compile_p95_ms", "compile of a schema, p95, ms", "<=", 50),
    Goal("mask_p99_ms", "a mask at a vocabulary of 131,072, p99, ms", "<=", 0.6),
]


def main() -> None:
    parser = argparse.ArgumentParser("scripts/bench guides", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--each", type=int, default=60, help="schemas of each set (default: 60)")
    parser.add_argument("--write", action="store_true", help=f"put the figures into {PAGE}")
    arguments = parser.parse_args()
    draw = random.Random(1)
    findings = Found()
    config = vocabulary()
    compiler = GuideCompiler(lambda: config, Start(VOCAB_SIZE))
    # The process starts, the vocabulary is read
    compiler.compile(GuidedDecodingParams(GuideType.JSON))
    for path in chosen(arguments.folder, arguments.each, draw):
        findings.follow(compiler, path, draw)

    compiler.close()
    print(
        json.dumps(findings.refusals.most_common(), indent=0),
        *findings.wrong,
        sep="\n",
        file=sys.stderr,
    )
    text = table(findings.figures(), GOALS)
    print(text)
    if arguments.write:
        closing = f"{findings.num_schemas} schemas, {arguments.each} of each set. On {machine()}."
        write(
            f"{text}\n\n{closing}",
            ("<!-- guides figures -->", "<!-- end of guides figures -->"),
            ROOT / PAGE,
        )


class Found:
    """What was found so far."""

    def __init__(self) -> None:
        self.num_schemas = self.num_accepted = self.num_valid = self.num_written = 0
        self.refusals: Counter[str] = Counter()
        # Schemas, with the first value that should not be possible
        self.wrong: list[str] = []
        self.compiles_s: list[float] = []
        self.masks_s: list[float] = []

    def follow(self, compiler: GuideCompiler, path: Path, draw: random.Random) -> None:
        schema = json.loads(path.read_text())
        self.num_schemas += 1
        start_s = time.perf_counter()
        try:
            guide = compiler.compile(
                GuidedDecodingParams(GuideType.JSON_SCHEMA, json.dumps(schema))
            )
        except LmiError as error:
            self.refusals[error.message[:100]] += 1
            return

        self.compiles_s.append(time.perf_counter() - start_s)
        self.num_accepted += 1
        possible = [
            answer for _ in range(NUM_WALKS) if (answer := self.walk(guide, draw)) is not None
        ]
        wrong = [answer for answer in possible if not is_valid(json.loads(answer), schema)]
        for test in instances_of(path):
            can_be_written = accepts(
                guide, json.dumps(test["data"], separators=(",", ":"), ensure_ascii=False)
            )
            self.num_valid += test["valid"]
            self.num_written += test["valid"] and can_be_written
            if can_be_written and not test["valid"] and not is_valid(test["data"], schema):
                wrong.append(json.dumps(test["data"]))

        if wrong:
            self.wrong.append(f"{path.name}: {wrong[0][:300]}")

    def walk(self, guide: Compiled, draw: random.Random) -> str | None:
        """A whole answer, or None if it has not come to its end. What closes a value is drawn
        often.
        """
        matcher = guide.matcher.deep_copy()
        vocabulary = guide.vocabulary
        ids = list[int]()
        closing = [
            token_id
            for text in CLOSING
            for token_id in vocabulary.tokenizer.tokenize_bytes(text.encode())[:1]
        ]
        for _ in range(MAX_TOKENS):
            start_s = time.perf_counter()
            mask = vocabulary.mask_from(matcher)
            self.masks_s.append(time.perf_counter() - start_s)
            if matcher.is_error():
                self.refusals["in a walk"] += 1
                return None

            allowed = np.flatnonzero(
                np.unpackbits((mask & ~vocabulary.marks).view(np.uint8), bitorder="little")
            )
            if matcher.is_accepting() and (not allowed.size or draw.random() < 0.5):
                return str(vocabulary.tokenizer.decode_bytes(ids).decode())

            ends = np.intersect1d(allowed, closing)
            ids.append(int(draw.choice(ends if ends.size and draw.random() < 0.5 else allowed)))
            matcher.consume_token(ids[-1])

        return None

    def figures(self) -> dict[str, float]:
        return {
            "accepted": self.num_accepted / self.num_schemas,
            "right": 1 - len(self.wrong) / self.num_accepted,
            "compile_p95_ms": quantile(self.compiles_s, 0.95) * 1000,
            "mask_p99_ms": quantile(self.masks_s, 0.99) * 1000,
        }


def chosen(folder: Path, num_each: int, draw: random.Random) -> Iterator[Path]:
    """Some schemas of each set."""
    for name in SETS:
        yield from draw.sample(sorted((folder / "data" / name).iterdir()), num_each)


def instances_of(path: Path) -> list[dict[str, Any]]:
    """Values with `data` and whether it is `valid`."""
    tests = path.parents[2] / "maskbench" / "data" / f"{path.parent.name}---{path.name}"
    return list(json.loads(tests.read_text())["tests"]) if tests.is_file() else []


def is_valid(value: object, schema: Any) -> bool:
    return bool(jsonschema.validators.validator_for(schema)(schema).is_valid(value))


def accepts(guide: Compiled, text: str) -> bool:
    matcher = guide.matcher.deep_copy()
    ids = guide.vocabulary.tokenizer.tokenize_bytes(text.encode())
    return (
        matcher.try_consume_tokens(ids) == len(ids)
        and matcher.is_accepting()
        and not matcher.is_error()
    )


def vocabulary() -> GuidedDecodingConfig:
    """Byte pairs of the Python sources that are installed here."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    path = ROOT / "build" / "guides" / "tokenizer.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE, special_tokens=["<|end|>"], initial_alphabet=alphabet
        )
        tokenizer.train(sorted(map(str, Path(np.__file__).parents[1].rglob("*.py"))), trainer)
        tokenizer.save(str(path))
        (path.parent / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))

    return read_config(path.parent)


if __name__ == "__main__":
    main()
