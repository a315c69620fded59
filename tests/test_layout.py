"""What keeps the source tree a tree: imports point downwards, and no process loads what it may
never use.
"""

import ast
import functools
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from lmi.settings.properties import read
from lmi.settings.table import OPTIONS
from lmi.shared.machine import Machine
from lmi.types import GenerationRequest

ROOT = Path(__file__).resolve().parent.parent

# Bottom first. Within lmi, a module may import only from the layers below its own and from its own
# package. The folders of annexes have no layer, since several processes use each.
# tests/test_rings.py says who imports them.
LAYERS = (
    {"lmi", "lmi.errors"},
    {"lmi.executor", "lmi.shared"},
    {"lmi.capabilities", "lmi.http", "lmi.ipc", "lmi.settings", "lmi.types"},
    {"lmi.apis", "lmi.runtime", "lmi.text"},
    {"lmi.engine"},
    {"lmi.sequences"},
    {"lmi.client", "lmi.gateway", "lmi.pipeline"},
    {"lmi.supervisor"},
    {"lmi.server"},
    {"lmi.embedded", "lmi.flags", "lmi.model_commands"},
    {"lmi.commands"},
    {"lmi.cli"},
    {"lmi.__main__"},
)
ANNEX_FOLDERS = {
    f"lmi.{name}"
    for name in (
        *("adapters", "chats", "description", "duplex", "models", "sessions", "sources"),
        *("tracing", "user_code"),
    )
}
LAYER = {part: number for number, layer in enumerate(LAYERS) for part in layer}
ENGINES = {"torch", "vllm", "tensorrt_llm", "xgrammar", "llguidance", "safetensors"}
# What a handler may import from lmi: the contract, the layers below it, and the names of an
# adapter's files.
CONTRACT = {"lmi.capabilities", "lmi.errors", "lmi.executor", "lmi.settings", "lmi.shared"}
FILES_OF_ADAPTERS = "lmi.adapters.files"
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
ENGINE_NAME = re.compile("vllm|lmi.?dist|trt.?llm|tensorrt", re.IGNORECASE)
# Texts for people, and names on the wire: help of options, engines that LMI names.
ENGINES_NAMED_IN = {
    "lmi.apis.openai.fields": {"vllm_xargs"},
    "lmi.user_code.options": {
        "Python or MPI; what runs the model is option.rolling_batch (auto, vllm, trtllm, lmi-dist)"
    },
    # A value of another server's option
    "lmi.settings.annexes": {
        "vllm",
        "auto, vllm, lmi, or a folder with a generation_config.json",
        "what counts where a request to OpenAI's or Anthropic's APIs is silent. auto: the model's "
        "generation_config.json; a folder: the one in it; vllm, lmi: what these APIs document",
    },
    "lmi.settings.config": {
        *("lmi-dist", "vllm", "trtllm", "engine: auto, lmi-dist, vllm, trtllm, scheduler, disable"),
        "run Python code that comes with the model (vllm, trtllm)",
        "GPUs that share each layer, or groups of cores on a CPU (vllm); max: all GPUs",
        *("SM_VLLM_MODEL", "SM_VLLM_REVISION"),
    },
    # What another server's app holds
    "lmi.user_code.standards.app": {"vllm_config"},
    "lmi.user_code.standards.worker": {"vllm"},
    # Variables of another image
    "lmi.settings.engine_flags": {"SM_VLLM_"},
    "lmi.settings.other_names": {"SM_VLLM_CONFIG"},
    # The beginning of another server's metrics
    "lmi.server.twins": {"vllm:"},
}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imported_modules(path: Path) -> tuple[str, ...]:
    """Every module that the file imports, at any place; `from a import b` gives a.b if that is a
    module.
    """
    modules: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            base = ROOT / Path(*str(node.module).split("."))
            for alias in node.names:
                is_module = (base / alias.name).is_dir() or (base / f"{alias.name}.py").is_file()
                modules.append(f"{node.module}.{alias.name}" if is_module else str(node.module))

    return tuple(modules)


def part_of(module: str) -> str:
    """The layer table's name for a module: lmi.server.app belongs to lmi.server."""
    return ".".join(module.split(".")[:2])


def test_every_module_of_lmi_has_a_layer() -> None:
    assert {part_of(module_name(path)) for path in sources("lmi")} - LAYER.keys() == ANNEX_FOLDERS


@pytest.mark.parametrize("path", sources("lmi"), ids=module_name)
def test_imports_point_downwards(path: Path) -> None:
    own_part = part_of(module_name(path))
    for module in imported_modules(path):
        top = module.split(".")[0]
        assert top not in ENGINES | {"handlers"}, f"{own_part} imports {module}"

        if (
            top == "lmi"
            and part_of(module) != own_part
            and not ANNEX_FOLDERS & {own_part, part_of(module)}
        ):
            assert LAYER[part_of(module)] < LAYER[own_part], (
                f"{own_part} imports {module}, which does not stand below it"
            )


def test_no_module_is_imported_by_what_it_imports() -> None:
    """Imports inside functions and for types count too."""
    paths = sources("lmi") + sources("handlers")
    modules = {module_name(path): path for path in paths}
    imported = {
        name: (modules.keys() & set(imported_modules(path))) - {name}
        for name, path in modules.items()
    }
    # It raises CycleError.
    TopologicalSorter(imported).prepare()


def test_the_settings_that_every_process_reads_stand_on_nothing_of_ours_but_what_an_option_is() -> (
    None
):
    code = (
        "import sys, lmi.settings.config; print(*sorted(name for name in sys.modules if "
        "name.startswith('lmi.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    settings = ("", ".annexes", ".config", ".kinds", ".listeners", ".option", ".user")
    options = ("lmi.user_code", "lmi.user_code.options")
    assert done.stdout.split() == [*(f"lmi.settings{name}" for name in settings), *options]


@pytest.mark.parametrize("path", sources("handlers"), ids=module_name)
def test_handlers_know_the_contract_alone(path: Path) -> None:
    modules = {module for module in imported_modules(path) if module.split(".")[0] == "lmi"} - {
        FILES_OF_ADAPTERS
    }
    assert {part_of(module) for module in modules} <= CONTRACT | {"lmi"}


@pytest.mark.parametrize("path", sources("handlers"), ids=module_name)
def test_no_handler_imports_another(path: Path) -> None:
    rooms = {
        part_of(module) for module in imported_modules(path) if module.startswith("handlers.lmi_")
    }
    assert rooms <= {part_of(module_name(path))}


def words_of(path: Path) -> Iterator[str]:
    """Every name and every text in the code of a file, without docstrings and comments, which are
    for people.
    """
    tree = ast.parse(path.read_text())
    docstrings = {
        ast.get_docstring(node, clean=False)
        for node in ast.walk(tree)
        if isinstance(node, DOCUMENTED)
    }
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            texts = value if isinstance(value, list) else [value]
            yield from (text for text in texts if isinstance(text, str) and text not in docstrings)


# djl_python uses names of the reference
OURS = [path for path in sources("lmi") if "compat" not in path.parts]


@pytest.mark.parametrize("path", OURS, ids=module_name)
def test_lmi_names_no_engine(path: Path) -> None:
    allowed = ENGINES_NAMED_IN.get(module_name(path), set())
    words = {" ".join(word.split()) for word in words_of(path)}
    assert {word for word in words if ENGINE_NAME.search(word)} == allowed


def test_the_folder_that_user_code_imports_from_holds_djl_python_and_nothing_else() -> None:
    assert [path.name for path in (ROOT / "lmi/user_code/compat").iterdir()] == ["djl_python"]


def test_what_stands_for_another_engine_has_a_folder_of_its_own() -> None:
    folder = ROOT / "lmi/user_code/standards/compat"
    assert [path.name for path in folder.iterdir()] == ["vllm"]


def test_the_pipeline_reads_every_field_of_a_request() -> None:
    """A request has no field for the form of the answer, which is in AnswerFormat."""
    source = "".join(
        (ROOT / "lmi" / file).read_text()
        for file in ("pipeline.py", "sequences.py", "text/answer.py")
    )
    names = GenerationRequest.__struct_fields__
    assert [name for name in names if f"request.{name}" not in source] == []


# What the start of a process must not wait for: it is imported by the function that needs it, if
# any does.
ALWAYS = ENGINES | {"transformers", "numpy", "handlers"}
# Which only the process of user code can run
CODE = {"lmi.user_code.runner"}
SERVING = {
    *("starlette", "uvicorn", "tokenizers", "jinja2", "lmi.server", "lmi.text", "lmi.apis"),
    # All that serves imports it
    "lmi.user_code.calls",
}
CLIENTS = {
    "huggingface_hub",
    "httpx2",
    "boto3",
    "rich",
    "prometheus_client",
    "lmi.gateway.worker",
    "lmi.sources.job",
}
UNUSED_AT_START: dict[str, set[str]] = {
    "lmi.cli": CLIENTS
    | SERVING
    | {
        "asyncio",
        "ssl",
        "http.client",
        "lmi.supervisor",
        "lmi.gateway",
        "lmi.engine",
        "lmi.client",
    },
    "lmi.supervisor.supervisor": CLIENTS
    | SERVING
    | CODE
    | {"asyncio", "ssl", "http.client", "click", "lmi.engine"},
    "lmi.engine.worker": CLIENTS
    | SERVING
    | CODE
    | {"click", "importlib.metadata", "lmi.settings.handler"},
    "lmi.server.app": CLIENTS
    | CODE
    | {
        *(
            "jinja2",
            "lmi.chats",
            "lmi.description.document",
            "lmi.models.registry",
            "lmi.settings.resolve",
            "click",
        ),
        *("lmi.tracing", "opentelemetry"),
        *("lmi.duplex.conversation", "lmi.duplex.socket", "lmi.http.websocket", "websockets"),
        # Of one kind of user code
        *("lmi.user_code.standards.calls", "lmi.user_code.standards.door", "fastapi"),
    },
    # Who does not switch the control plane on does not pay for it.
    "lmi.gateway.worker": {"botocore", "lmi.gateway.control"},
    # A front end imports it with the model's tokenizer.
    "lmi.chats.template": {"difflib", "lmi.settings.steps", "lmi.settings.table"},
    **dict.fromkeys(
        ("lmi.user_code.worker", "lmi.sources.hub", "lmi.sources.worker"),
        set(),
    ),
}


@pytest.mark.parametrize(("module", "unused"), UNUSED_AT_START.items())
def test_a_process_starts_without_what_it_may_never_use(module: str, unused: set[str]) -> None:
    """A server should be ready within a second, and the supervisor, which lives longest, must never
    fail.
    """
    code = f"import sys, {module}; print(sorted({ALWAYS | unused} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# Python writes and compiles the methods of a frozen dataclass, which takes as long as 36 structs.
# Of the classes that a plain start makes only these are such: one has to work without any package,
# and the others are replaced beside settings.
FROZEN_DATACLASSES = {"Machine", "Resolved", "StartInputs"}
FROZEN_IN = """
import importlib, sys
importlib.import_module(sys.argv[1])
for name, module in sys.modules.items():
    for made in vars(module).values() if name.split(".")[0] in ("lmi", "handlers") else ():
        parameters = vars(made).get("__dataclass_params__") if isinstance(made, type) else None
        if parameters is not None and parameters.frozen:
            print(made.__name__)
"""


@pytest.mark.parametrize(
    "module",
    [
        "lmi.supervisor.supervisor",
        "lmi.server.app",
        "lmi.engine.worker",
        "handlers.lmi_dist.executor",
    ],
)
def test_a_start_makes_structs_and_no_frozen_dataclasses(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FROZEN_IN, module],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(done.stdout.split()) <= FROZEN_DATACLASSES


def test_the_wheel_carries_packages_djl_python_pages_and_the_demo_model_and_nothing_else() -> None:
    code = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code, folder]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        names = zipfile.ZipFile(Path(folder) / done.stdout.split()[-1]).namelist()

    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {
        "lmi",
        "handlers",
    }
    assert {str(path.relative_to(ROOT)) for path in sources("lmi/user_code/compat")} <= set(names)
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "lmi/server/pages").iterdir()} <= set(
        names
    )

    demo = {path.name for path in (ROOT / "handlers/lmi_dist/demo").iterdir() if path.is_file()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= demo
    assert {f"handlers/lmi_dist/demo/{name}" for name in demo} <= set(names)


def test_the_example_names_every_option() -> None:
    text = (ROOT / "serving.properties").read_text()
    keys_named = {
        line.removeprefix("#").partition("=")[0]
        for line in text.splitlines()
        if "=" in line and "# " not in line
    }
    assert keys_named == {option.key for option in OPTIONS}


def test_the_defaults_that_the_example_names_are_the_defaults(tmp_path: Path) -> None:
    from lmi.settings.properties import parse
    from lmi.settings.resolve import resolve
    from lmi.settings.start import StartInputs

    example = ROOT / "serving.properties"
    uncommented = "\n".join(
        line.removeprefix("#") if line.startswith("#") and not line.startswith("# ") else line
        for line in example.read_text().splitlines()
    )
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "config.json").write_text("{}")
    start = StartInputs(folder=tmp_path, machine=Machine.here({}))
    as_it_is = resolve(replace(start, properties=read(example)))
    spelled_out = resolve(replace(start, properties=parse(uncommented)))

    assert as_it_is.config == spelled_out.config
    assert spelled_out.warnings == ()
    assert (
        len([row for row in spelled_out.settings if row.source.startswith("serving.properties")])
        > 20
    )


def test_the_example_and_the_page_of_options_are_what_their_script_writes(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "scripts/example", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in ("serving.properties", "docs/options.md"):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text()


@pytest.mark.parametrize("script", ["install", "serve", "test", "check", "sanitize"])
def test_scripts_can_be_run_and_stop_at_the_first_error(script: str) -> None:
    path = ROOT / "scripts" / script
    assert os.access(path, os.X_OK)
    assert "set -euo pipefail" in path.read_text()
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_what_the_installation_asks_before_it_installs_needs_only_python() -> None:
    [code] = re.findall(r"-c '(.*lmi\..*)'; }", (ROOT / "scripts" / "install").read_text())
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().isdecimal()


def test_no_lock_names_a_place_and_every_line_has_a_hash() -> None:
    for lock in (ROOT / "scripts" / "locks").glob("*.txt"):
        for line in lock.read_text().splitlines():
            pin, *hashes = line.split(" ")
            assert "==" in pin and hashes, line
            assert all(part.startswith("--hash=sha256:") and len(part) == 78 for part in hashes), (
                line
            )


@pytest.mark.parametrize("page", ["lmi/README.md", "handlers/README.md", "docs/adding.md"])
def test_every_file_and_name_in_it_that_a_page_for_developers_names_is_there(page: str) -> None:
    paths = [path for folder in ("lmi", "handlers", "tests") for path in sources(folder)]
    text = (ROOT / page).read_text().replace("lmi_NAME", "lmi_dist")
    places_named = re.findall(r"`([\w/]+\.py)(?:: (\w+)[\w.]*)?`", text)
    for file, name in places_named:
        sources_found = [path.read_text() for path in paths if str(path).endswith(f"/{file}")]
        assert any(re.search(rf"\b{name}\b", source) for source in sources_found), f"{file}: {name}"

    assert len(places_named) > 20


def test_the_functions_to_read_first_are_there_and_are_not_too_many() -> None:
    text = (ROOT / "lmi" / "README.md").read_text()
    [lists] = re.findall("## Where to begin\n(.*?)\n## ", text, re.DOTALL)
    sizes = [
        sum(num_lines_of(row) for row in re.findall(r"^\| `(.+?)` \|", part, re.MULTILINE))
        for part in lists.split("### ")[1:]
    ]

    # The way of a request, HTTP, and processes.
    assert len(sizes) == 3
    assert max(sizes) <= 2_400, sizes


def num_lines_of(row: str) -> int:
    """Return the lines of what a row like `file.py: Class.method, function` names."""
    file, _, names = row.partition(": ")
    folder = ROOT if file.startswith("handlers/") else ROOT / "lmi"
    definitions = definitions_of(ast.parse((folder / file).read_text()))
    return sum(definitions[name] for name in names.split(", "))


def definitions_of(tree: ast.Module | ast.ClassDef) -> dict[str, int]:
    """Return the lines of each function, class and method, by its name."""
    lines = dict[str, int]()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines[node.name] = node.end_lineno - node.lineno + 1

        if isinstance(node, ast.ClassDef):
            methods = definitions_of(node)
            lines |= {f"{node.name}.{name}": size for name, size in methods.items()}

    return lines
