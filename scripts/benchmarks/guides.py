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
from handlers.guides.tokenizer_files import read_vocabulary
from lmi.client.bench.figures import quantile
from lmi.errors import LmiError
from lmi.executor import GuidedDecodingConfig, GuidedDecodingParams, GuideType
from scripts.benchmarks.table import PAGE, ROOT, Goal, machine, table, write

# The folders of schemas.
SETS = (
    "Glaiveai2K",
    "Github_trivial",
    "Github_easy",
    "Github_medium",
    "Github_hard",
    "Github_ultra",
    "JsonSchemaStore",
    "Kubernetes",
    "Snowplow",
    "WashingtonPost",
)
# The walks through the masks of a guide, and the most tokens of one.
NUM_WALKS = 2
MAX_TOKENS = 400
VOCAB_SIZE = 131_072
# What closes a value. A walk takes it often, so that it comes to an end.
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
    findings = Findings()
    config = vocabulary()
    compiler = GuideCompiler(lambda: config, Start(VOCAB_SIZE))
    # The process starts, and reads the vocabulary.
    compiler.compile(GuidedDecodingParams(GuideType.JSON))
    for path in some_schemas(arguments.folder, arguments.each, draw):
        findings.follow(compiler, path, draw)

    compiler.close()
    refusals = json.dumps(findings.refusals.most_common(), indent=0)
    print(refusals, *findings.wrong, sep="\n", file=sys.stderr)
    text = table(findings.figures(), GOALS)
    print(text)
    if arguments.write:
        closing = f"{findings.num_schemas} schemas, {arguments.each} of each set. On {machine()}."
        write(
            f"{text}\n\n{closing}",
            ("<!-- guides figures -->", "<!-- end of guides figures -->"),
            ROOT / PAGE,
        )


class Findings:
    """What was found so far."""

    def __init__(self) -> None:
        self.num_schemas = 0
        self.num_accepted = 0
        # Valid instances of accepted schemas, and those of them that a guide lets be written.
        self.num_valid = 0
        self.num_written = 0
        # By reason.
        self.refusals: Counter[str] = Counter()
        # Schemas, each with the first value that should not be possible.
        self.wrong: list[str] = []
        self.compiles_s: list[float] = []
        self.masks_s: list[float] = []

    def follow(self, compiler: GuideCompiler, path: Path, draw: random.Random) -> None:
        """Compile a schema, and find what its guide lets be written that it should not."""
        schema = json.loads(path.read_text())
        self.num_schemas += 1
        params = GuidedDecodingParams(GuideType.JSON_SCHEMA, json.dumps(schema))
        start_s = time.perf_counter()
        try:
            guide = compiler.compile(params)
        except LmiError as error:
            self.refusals[error.message[:100]] += 1
            return

        self.compiles_s.append(time.perf_counter() - start_s)
        self.num_accepted += 1
        wrong_values: list[str] = []
        for _ in range(NUM_WALKS):
            answer = self.walk(guide, draw)
            if answer is not None and not is_valid(json.loads(answer), schema):
                wrong_values.append(answer)

        wrong_values += self._wrong_instances(guide, path, schema)
        if wrong_values:
            self.wrong.append(f"{path.name}: {wrong_values[0][:300]}")

    def _wrong_instances(self, guide: Compiled, path: Path, schema: Any) -> list[str]:
        """Return the invalid instances of a schema that its guide lets be written, and count the
        valid ones.
        """
        wrong_values: list[str] = []
        for test in instances_of(path):
            value = test["data"]
            text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
            can_be_written = accepts(guide, text)
            if test["valid"]:
                self.num_valid += 1
                self.num_written += can_be_written
            elif can_be_written and not is_valid(value, schema):
                wrong_values.append(json.dumps(value))

        return wrong_values

    def walk(self, guide: Compiled, draw: random.Random) -> str | None:
        """Return a whole answer of random tokens, or None if it has not come to its end."""
        matcher = guide.matcher.deep_copy()
        vocabulary = guide.vocabulary
        token_ids: list[int] = []
        closing_ids: list[int] = []
        for text in CLOSING:
            closing_ids += vocabulary.tokenizer.tokenize_bytes(text.encode())[:1]

        for _ in range(MAX_TOKENS):
            start_s = time.perf_counter()
            mask = vocabulary.mask_from(matcher)
            self.masks_s.append(time.perf_counter() - start_s)
            if matcher.is_error():
                self.refusals["in a walk"] += 1
                return None

            bits = (mask & ~vocabulary.eos_mask).view(np.uint8)
            allowed_ids = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            if matcher.is_accepting() and (not allowed_ids.size or draw.random() < 0.5):
                return str(vocabulary.tokenizer.decode_bytes(token_ids).decode())

            possible_ids = np.intersect1d(allowed_ids, closing_ids)
            if not possible_ids.size or draw.random() >= 0.5:
                possible_ids = allowed_ids

            token_id = int(draw.choice(possible_ids))
            token_ids.append(token_id)
            matcher.consume_token(token_id)

        return None

    def figures(self) -> dict[str, float]:
        return {
            "accepted": self.num_accepted / self.num_schemas,
            "right": 1 - len(self.wrong) / self.num_accepted,
            "compile_p95_ms": quantile(self.compiles_s, 0.95) * 1000,
            "mask_p99_ms": quantile(self.masks_s, 0.99) * 1000,
        }


def some_schemas(folder: Path, num_each: int, draw: random.Random) -> Iterator[Path]:
    """Yield some schemas of each set."""
    for name in SETS:
        schemas = sorted((folder / "data" / name).iterdir())
        yield from draw.sample(schemas, num_each)


def instances_of(path: Path) -> list[dict[str, Any]]:
    """Return values with `data` and whether it is `valid`."""
    file = path.parents[2] / "maskbench" / "data" / f"{path.parent.name}---{path.name}"
    if not file.is_file():
        return []

    return list(json.loads(file.read_text())["tests"])


def is_valid(value: object, schema: Any) -> bool:
    validator = jsonschema.validators.validator_for(schema)
    return bool(validator(schema).is_valid(value))


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

    return read_vocabulary(path.parent)


if __name__ == "__main__":
    main()
