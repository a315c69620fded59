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
# What LLM takes as its **kwargs
ARGUMENTS = "tensorrt_llm.llmapi.TorchLlmArgs"
# `inputs` and `sampling_params`: the lines differ in what follows
MAX_POSITIONAL = {"generate_async": 2}
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
    lines_of: dict[str, list[str]] = {package: [] for package in packages}
    for line in done.stdout.splitlines():
        package, _, problem = line.partition("/")
        if " error: " in problem:
            lines_of[package].append(problem)

    return lines_of


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
            f"from tensorrt_llm._facts import {class_name} as {class_name}"
            if class_name in short
            else f"{class_name}: Any"
            for class_name in names
        ]
        if not any(part.startswith("_") for part in module.split(".")):
            (place / "__init__.pyi").write_text("\n".join(["from typing import Any", *lines]))


def _enum(name: str, members: Iterable[str]) -> str:
    return f"class {name}(Enum):\n" + "".join(f"    {member} = ...\n" for member in members)


def _class(name: str, facts: Facts) -> str:
    class_fact = facts.classes[name]
    title = name.rpartition(".")[2]
    inner = [
        _class(class_name, facts)
        for class_name in facts.classes
        if class_name.rpartition(".")[0] == name
    ]
    nested = {
        class_name.rpartition(".")[2]
        for class_name in facts.classes
        if class_name.rpartition(".")[0] == name
    }
    lines = [line for text in inner for line in text.splitlines()]
    lines += ["model_fields: ClassVar[dict[str, Any]]"] if class_fact.extra else []
    lines.append(f"def __init__(self, {_parameters(_own(class_fact, title, facts))}) -> None: ...")
    for method, fact in class_fact.methods.items():
        lines.append(
            f"def {method}({_parameters(_shown(method, fact))}) -> "
            f"{TYPES.get(f'{title}.{method}', 'Any')}: ..."
        )

    for class_name in sorted({*class_fact.attributes} - nested - class_fact.methods.keys()):
        if not class_name.startswith("_"):
            lines.append(f"{class_name}: {TYPES.get(f'{title}.{class_name}', 'Any')}")

    return f"class {title}({', '.join(class_fact.bases)}):\n" + "".join(
        f"    {line}\n" for line in lines
    )


def _own(known: Class, title: str, facts: Facts) -> list[Parameter]:
    """The parameters of the constructor."""
    parameters = [fact.parameter for fact in known.parameters]
    if title != "LLM":
        return parameters

    more = [
        fact.parameter
        for fact in facts.classes[ARGUMENTS].parameters
        if fact.name not in {parameter.name for parameter in parameters}
    ]
    return [
        parameter for parameter in parameters if parameter.kind is not Parameter.VAR_KEYWORD
    ] + [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in more]


def _shown(method: str, fact: Callable) -> list[Parameter]:
    """The parameters of a method, those that are not safe by position by their names only."""
    most = MAX_POSITIONAL.get(method, 99) + 1
    parameters = [parameter.parameter for parameter in fact.parameters]
    return [
        *parameters[:most],
        *(parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in parameters[most:]),
    ]


def _parameters(parameters: Iterable[Parameter]) -> str:
    parts = list[str]()
    has_star = False
    for parameter in parameters:
        if parameter.name.startswith("_"):
            continue

        if parameter.kind is Parameter.KEYWORD_ONLY and not has_star:
            parts.append("*")
            has_star = True

        stars = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        hint = "" if parameter.name == "self" else f": {TYPES.get(parameter.name, 'Any')}"
        is_open = stars or parameter.default is Parameter.empty
        parts.append(f"{stars}{parameter.name}{hint}" + ("" if is_open else " = ..."))

    return ", ".join(parts)
