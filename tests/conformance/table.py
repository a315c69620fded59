"""The tables of `docs/engines.md`: what each engine can, and how it behaves.

`scripts/conformance-table` writes them. A row of the first is a capability. A row of the second is
a test of this folder, whose name is the behaviour; the test says with `needs` what an engine must
be able to do for it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmi.executor import Capabilities, GuideType

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
BEGIN = "<!-- written by scripts/conformance-table -->"
END = "<!-- end -->"
FILES = sorted({path.stem for path in Path(__file__).parent.glob("test_*.py")} - {"test_table"})
ENGINES = ("lmi-dist", "vllm", "trtllm-main-2025-10", "trtllm-main-2026-08", "echo")
ENGINE_FIXTURES = {"executor", "fresh", "adaptable"}
YES = "yes"
NO = "–"

Need = tuple[str, GuideType | None]


def needs(capability: str, kind: GuideType | None = None) -> pytest.MarkDecorator:
    """Mark a test of what not every engine can. `kind` is one of guided decoding's."""
    return pytest.mark.needs(capability, kind)


def has(can: Capabilities, need: Need) -> bool:
    capability, kind = need
    value = getattr(can, capability)
    if kind is not None:
        return kind in value

    return value > 1 if capability == "max_beam_width" else bool(value)


def named(need: Need) -> str:
    capability, kind = need
    return capability if kind is None else f"{capability}: {kind.name}"


@dataclass(frozen=True)
class Behaviour:
    """A test of this folder."""

    title: str
    needs: tuple[Need, ...]

    def cell(self, can: Capabilities) -> str:
        return YES if all(has(can, need) for need in self.needs) else NO


def behaviours() -> list[Behaviour]:
    return [behaviour for file in FILES for behaviour in _of_file(file)]


def _of_file(file: str) -> Iterator[Behaviour]:
    module = importlib.import_module(f"tests.conformance.{file}")
    of_all = getattr(module, "pytestmark", [])
    of_all = of_all if isinstance(of_all, list) else [of_all]
    for name, test in vars(module).items():
        if name.startswith("test_") and ENGINE_FIXTURES & inspect.signature(test).parameters.keys():
            marks = [*of_all, *getattr(test, "pytestmark", [])]
            yield Behaviour(
                _title(name), tuple(mark.args for mark in marks if mark.name == "needs")
            )


def _title(name: str) -> str:
    return name.removeprefix("test_").replace("_", " ")


# Fields that are no ability of an engine
ABOUT_OTHERS = (
    "why_no_guides",
    "logits_post_processor_arrays",
    "embeddings",
)


def abilities(can: Capabilities) -> dict[str, str]:
    """What an engine can, by the names of its capabilities."""
    return {name: _ability(can, name) for name in can.__struct_fields__ if name not in ABOUT_OTHERS}


def _ability(can: Capabilities, name: str) -> str:
    if name in ("max_top_log_probs", "max_temperature"):
        return f"{getattr(can, name):g}"

    if name == "guided_decoding":
        return ", ".join(kind.name for kind in can.guided_decoding) or NO

    return YES if has(can, (name, None)) else NO


def tables(engines: Mapping[str, Capabilities]) -> str:
    """Both tables, with a column for each engine."""
    heads = [head(name) for name in engines]
    columns = [abilities(can) for can in engines.values()]
    can = [[f"`{name}`", *(column[name] for column in columns)] for name in columns[0]]
    does = [
        [behaviour.title, *(behaviour.cell(engine) for engine in engines.values())]
        for behaviour in behaviours()
    ]
    return "\n".join(
        [*_table(["capability", *heads], can), "", *_table(["behaviour", *heads], does)]
    )


def head(engine: str) -> str:
    """Of an engine's column. It says where no real library is behind the adapter."""
    return f"`{engine}`, double" if engine.startswith("trtllm") else f"`{engine}`"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]


def written() -> str:
    """What stands on the page now."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()


def write(text: str) -> None:
    before, _, tail = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{tail.partition(END)[2]}")
