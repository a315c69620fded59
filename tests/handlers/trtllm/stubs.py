"""Writes the facts as stubs, with which mypy checks the imports, attributes and keywords of an
adapter.

Of types they have only those that lead from one published class to another. No private name is in a
stub. The keywords that a dictionary brings are left to the double, which refuses what it does not
know.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping
from inspect import Parameter
from pathlib import Path

from tests.handlers.trtllm.facts import Callable, Class, Facts, load

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "handlers" / "lmi_trtllm"
OURS = "handlers.lmi_trtllm"
ARGUMENTS = "tensorrt_llm.llmapi.TorchLlmArgs"  # what LLM takes as its **kwargs
MAX_POSITIONAL = {
    "generate_async": 2
}  # `inputs` and `sampling_params`: the lines differ in what follows
TYPES = {
    "inputs": "Inputs | list[int]",
    "LLM.args": "TorchLlmArgs",
    "LLM.generate_async": "RequestOutput",
    "LLM.get_stats_async": "AsyncIterator[dict[str, Any]]",
    "RequestOutput.outputs": "list[CompletionOutput]",
    "RequestOutput.sampling_params": "SamplingParams",
    "RequestOutput.result": "RequestOutput",
    "RequestOutput.__aiter__": "AsyncIterator[RequestOutput]",
    "RequestOutput.__await__": "Generator[Any, Any, RequestOutput]",
    "CompletionOutput.logprobs": "list[dict[int, Logprob]]",
    "CompletionOutput.prompt_logprobs": "list[dict[int, Logprob]]",
}
HEAD = """
from collections.abc import AsyncIterator, Generator
from enum import Enum
from typing import Any, ClassVar, TypedDict

class Inputs(TypedDict, total=False):
    prompt: str
    prompt_token_ids: list[int]
"""
SETTINGS = f"""[mypy]
mypy_path = stubs:{ROOT}
explicit_package_bases = True
follow_imports = silent
check_untyped_defs = True
[mypy-lmi.*,handlers.base.*,torch.*,pydantic.*]
follow_imports = skip
"""


def adapter() -> dict[str, str]:
    """The texts of its modules, by their names."""
    return {file.stem: file.read_text(encoding="utf-8") for file in FOLDER.glob("*.py")}


def faults(
    folder: Path, profile: str, packages: Mapping[str, Mapping[str, str]]
) -> dict[str, list[str]]:
    """What mypy finds in each package, given by the texts of its modules: lines as `module.py:7:
    error: …`.
    """
    write_stubs(folder / "stubs" / "tensorrt_llm", load(profile))
    (folder / "mypy.ini").write_text(SETTINGS)
    for package, texts in packages.items():
        (folder / package).mkdir()
        for module, text in {"__init__": "", **texts}.items():
            (folder / package / f"{module}.py").write_text(text.replace(OURS, package))

    # Another profile beside this folder reads there what it has in common with this one.
    cache = f"--cache-dir={folder.parent / 'mypy-cache'}"
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", cache, *packages]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
    assert not done.stderr, done.stderr
    found: dict[str, list[str]] = {package: [] for package in packages}
    for line in done.stdout.splitlines():
        package, _, rest = line.partition("/")
        if " error: " in rest:
            found[package].append(rest)

    return found


def write_stubs(folder: Path, facts: Facts) -> None:
    """All classes are in one private module, from which each published module has those that it
    exports.
    """
    short = {name.rpartition(".")[2]: name for name in [*facts.classes, *facts.enums]}
    texts = [
        _class(name, facts)
        for name in facts.classes
        if name.rpartition(".")[0] not in facts.classes
    ]
    texts += [_enum(name.rpartition(".")[2], members) for name, members in facts.enums.items()]
    folder.mkdir(parents=True)
    (folder / "_facts.pyi").write_text("\n".join([HEAD, *texts]))
    for module, names in facts.exports.items():
        place = folder.joinpath(*module.split(".")[1:])
        place.mkdir(parents=True, exist_ok=True)
        lines = [
            f"from tensorrt_llm._facts import {one} as {one}" if one in short else f"{one}: Any"
            for one in names
        ]
        if not any(part.startswith("_") for part in module.split(".")):
            (place / "__init__.pyi").write_text("\n".join(["from typing import Any", *lines]))


def _enum(name: str, members: Iterable[str]) -> str:
    return f"class {name}(Enum):\n" + "".join(f"    {one} = ...\n" for one in members)


def _class(name: str, facts: Facts) -> str:
    known = facts.classes[name]
    title = name.rpartition(".")[2]
    inner = [_class(one, facts) for one in facts.classes if one.rpartition(".")[0] == name]
    nested = {one.rpartition(".")[2] for one in facts.classes if one.rpartition(".")[0] == name}
    lines = [line for text in inner for line in text.splitlines()]
    lines += ["model_fields: ClassVar[dict[str, Any]]"] if known.extra else []
    lines.append(f"def __init__(self, {_parameters(_own(known, title, facts))}) -> None: ...")
    for method, fact in known.methods.items():
        lines.append(
            f"def {method}({_parameters(_shown(method, fact))}) -> "
            f"{TYPES.get(f'{title}.{method}', 'Any')}: ..."
        )

    for one in sorted({*known.attributes} - nested - known.methods.keys()):
        if not one.startswith("_"):
            lines.append(f"{one}: {TYPES.get(f'{title}.{one}', 'Any')}")

    return f"class {title}({', '.join(known.bases)}):\n" + "".join(
        f"    {line}\n" for line in lines
    )


def _own(known: Class, title: str, facts: Facts) -> list[Parameter]:
    """The parameters of the constructor."""
    own = [fact.parameter for fact in known.parameters]
    if title != "LLM":
        return own

    more = [
        fact.parameter
        for fact in facts.classes[ARGUMENTS].parameters
        if fact.name not in {one.name for one in own}
    ]
    return [one for one in own if one.kind is not Parameter.VAR_KEYWORD] + [
        one.replace(kind=Parameter.KEYWORD_ONLY) for one in more
    ]


def _shown(method: str, fact: Callable) -> list[Parameter]:
    """The parameters of a method, those that are not safe by position by their names only."""
    most = MAX_POSITIONAL.get(method, 99) + 1
    shown = [one.parameter for one in fact.parameters]
    return [*shown[:most], *(one.replace(kind=Parameter.KEYWORD_ONLY) for one in shown[most:])]


def _parameters(parameters: Iterable[Parameter]) -> str:
    parts = list[str]()
    has_star = False
    for one in parameters:
        if one.name.startswith("_"):
            continue

        if one.kind is Parameter.KEYWORD_ONLY and not has_star:
            parts.append("*")
            has_star = True

        stars = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}.get(one.kind, "")
        hint = "" if one.name == "self" else f": {TYPES.get(one.name, 'Any')}"
        is_open = stars or one.default is Parameter.empty
        parts.append(f"{stars}{one.name}{hint}" + ("" if is_open else " = ..."))

    return ", ".join(parts)
