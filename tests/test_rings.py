"""The rings of the source tree: what a guest must read, what may wait, and how large it may be.

Ring 1 is the house: what one model, one API (LMI) and one engine (echo) need. Ring 2 are the
annexes, one feature each, in a folder, in files of the house's rooms, or in both. Ring 3 stands
beside. A module imports its own ring or an inner one, and an annex only those that ARROWS lists.
Where the house names its annexes is in JOINTS, and where it still imports one otherwise in STILL,
which may only shrink.
"""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from scripts.style import Style, style_of
from tests.test_layout import ANNEX_FOLDERS, imported_modules, module_name, sources

ANNEXES = {
    "openai": ("lmi.apis.openai", "lmi.server.routes.openai", "lmi.server.routes.tokens"),
    "anthropic": ("lmi.apis.anthropic", "lmi.server.routes.anthropic"),
    "responses": (
        "lmi.apis.responses",
        "lmi.server.routes.responses",
    ),
    "embeddings": ("lmi.apis.embeddings",),
    "tgi": ("lmi.apis.tgi", "lmi.server.routes.tgi"),
    "triton": ("lmi.apis.triton", "lmi.server.routes.kserve"),
    "batch": ("lmi.apis.batch",),
    "lines": ("lmi.server.lines",),
    "duplex": ("lmi.duplex", "lmi.http.websocket"),
    "chats": ("lmi.chats", "lmi.settings.chat_templates"),
    "description": ("lmi.description",),
    "pages": ("lmi.server.routes.pages", "lmi.server.page_files"),
    "metrics": (
        "lmi.server.metrics",
        "lmi.server.field_metrics",
        "lmi.server.load_report",
        "lmi.server.twins",
    ),
    "waiting": ("lmi.server.waiting",),
    "buffered_streams": ("lmi.http.buffered",),
    "access": ("lmi.server.access", "lmi.http.browsers", "lmi.supervisor.credentials"),
    "overload": (
        "lmi.engine.overload",
        "lmi.engine.patience",
        "lmi.engine.speed",
        "lmi.engine.timed_queue",
    ),
    "prefixes": ("lmi.engine.prefixes",),
    "desired_state": ("lmi.shared.desired_state",),
    "gguf": ("lmi.shared.gguf_file", "lmi.sources.gguf", "handlers.lmi_dist.gguf"),
    "adapters": ("lmi.adapters", "handlers.base.adapter_names", "handlers.base.adapters"),
    "models": ("lmi.models",),
    "sessions": ("lmi.sessions",),
    "user_code": ("lmi.user_code", "lmi.supervisor.code"),
    "sources": ("lmi.sources",),
    "start": ("lmi.supervisor.stages",),
    "tracing": ("lmi.tracing",),
    "options": ("lmi.settings.annexes", "lmi.settings.listeners", "lmi.settings.user"),
    "secure_mode": ("lmi.settings.secure_mode",),
    "strangers": ("lmi.settings.strangers",),
    "generation": ("lmi.settings.generation",),
    "commands": ("lmi.commands", "lmi.flags", "lmi.model_commands"),
    "choice": (
        "lmi.settings.engine_choice",
        "lmi.settings.engine_rules",
        "lmi.settings.gguf_choice",
        "lmi.settings.model_choice",
        "lmi.settings.model_names",
        "lmi.settings.placement",
        "lmi.settings.ports",
        "lmi.settings.replicas",
        "lmi.settings.served_folder",
        "lmi.settings.server_choice",
        "lmi.settings.tasks",
    ),
    "cores": ("lmi.supervisor.cores",),
    "other_names": (
        "lmi.settings.engine_flags",
        "lmi.settings.flag_variables",
        "lmi.settings.images",
        "lmi.settings.llama_cpp",
        "lmi.settings.other_names",
        "lmi.settings.other_servers",
        "lmi.settings.sglang",
    ),
    "takeover": ("lmi.supervisor.takeover",),
    "older_tokenizers": ("lmi.text.convert",),
    "welcome": (
        "lmi.engine.progress",
        "lmi.supervisor.hints",
        "lmi.supervisor.messages",
        "lmi.supervisor.throughput",
    ),
    "guides": ("lmi.apis.guides", "lmi.shared.json_references", "handlers.guides"),
    "beams": ("lmi.apis.beams", "handlers.base.beams"),
    "kv_events": ("handlers.base.kv_events",),
    "engines": (
        "handlers.driven",
        "handlers.base.cache_budget",
        "handlers.base.captured",
        "handlers.base.configuration",
        "handlers.base.pickles",
        "handlers.base.post_processors",
        "handlers.base.sequence",
        "handlers.base.waiting",
        "lmi.executor.config",
    ),
    "lmi_dist": ("handlers.lmi_dist",),
    "lmi_vllm": ("handlers.lmi_vllm",),
}
BESIDE = {
    "client": ("lmi.client",),
    "embedded": ("lmi.embedded",),
    "gateway": ("lmi.gateway", "lmi.supervisor.gateway"),
    "lmi_trtllm": ("handlers.lmi_trtllm",),
}
ARROWS = {
    "access": {"options"},
    "adapters": {
        *("description", "desired_state", "models", "openai", "secure_mode", "sources"),
        *("user_code",),
    },
    "anthropic": {"description", "guides", "openai"},  # both answer chats
    "choice": {"gguf", "options", "sources"},
    "commands": {"client", "gateway", "options", "other_names", "sources"},
    # The whole document names all of them, and each is described in its words
    "description": {
        *("adapters", "anthropic", "batch", "duplex", "embeddings", "metrics", "models"),
        "openai",
        *("pages", "responses", "sessions", "tgi", "triton"),
    },
    "embeddings": {"description", "openai"},
    "engines": {"adapters", "beams"},
    "generation": {"options"},
    "gguf": {"sources"},
    "lines": {"sessions"},
    "kv_events": {"options"},
    "lmi_dist": {
        *("adapters", "beams", "engines", "gguf", "guides", "kv_events", "options", "other_names"),
    },
    "lmi_vllm": {"adapters", "engines", "guides", "kv_events", "options"},
    "models": {
        *("adapters", "choice", "description", "desired_state", "gguf", "openai", "options"),
        *("other_names",),
        *("secure_mode", "sources", "start", "strangers"),
    },
    "openai": {"beams", "description", "guides"},
    "other_names": {"choice", "options", "user_code"},
    "pages": {"description", "metrics"},
    "responses": {"description", "guides", "openai"},
    "secure_mode": {"choice", "user_code"},
    "sources": {"gguf", "start"},
    "start": {"options", "sources"},
    "strangers": {"other_names", "secure_mode", "sources", "user_code"},
    "tgi": {"description", "guides"},
    "tracing": {"metrics"},
    "triton": {"beams", "description", "guides"},
    "user_code": {"access", "adapters", "choice", "cores", "options", "sources"},
}
# What names the annexes: the tuples of APIs and routes, the table of options, the words of the
# contract and the start.
JOINTS = {
    *(
        "lmi.apis.table",
        "lmi.cli",
        "lmi.engine.worker",
        "lmi.executor",
        "lmi.server.app",
        "lmi.server.service",
    ),
    *(
        "lmi.settings.config",
        "lmi.settings.freeze",
        "lmi.settings.resolve",
        "lmi.settings.step_order",
        "lmi.settings.steps",
        "lmi.supervisor.kinds",
        "lmi.supervisor.running_model",
        "lmi.supervisor.supervisor",
    ),
}
STILL = {
    "lmi.apis.lmi.schema": {"guides"},
    # Loaded with a model, and Jinja where the model has a template
    "lmi.pipeline": {"chats"},
    "lmi.server.respond": {"adapters", "sessions", "waiting"},
    "lmi.server.routes.invocations": {"lines"},
}
# Where the house meets the code that may come with a model: its options, its processes, its routes,
# and the hooks of a request, which are built with the service.
JOINTS_WITH_USER_CODE = {
    "lmi.server.app",
    "lmi.server.service",
    "lmi.settings.config",
    "lmi.settings.freeze",
    "lmi.settings.step_order",
    "lmi.settings.steps",
    "lmi.supervisor.running_model",
}
# Tokens of Python without comments and docstrings, so that nobody saves lines by packing them. A
# change that needs more raises a number and says why.
MAX_TOKENS_OF_THE_HOUSE = 100_950
MAX_TOKENS = 487_150
MAX_TOKENS_A_LINE = 8.5
OURS = {
    module_name(path): path
    for top in ("lmi", "handlers")
    for path in sources(top)
    if "compat" not in path.parts
}


def annex_of(module: str) -> str | None:
    """Return the annex that a module belongs to, None for the house. The longest name decides."""
    parts_named = {
        part: name for rooms in (ANNEXES, BESIDE) for name, parts in rooms.items() for part in parts
    }
    parts_found = [part for part in parts_named if module == part or module.startswith(f"{part}.")]
    return parts_named[max(parts_found, key=len)] if parts_found else None


def annexes_of(module: str) -> set[str]:
    """Return the other annexes that a module imports."""
    our_modules = (
        name for name in imported_modules(OURS[module]) if name.split(".")[0] in ("lmi", "handlers")
    )
    return {annex for annex in map(annex_of, our_modules) if annex is not None} - {annex_of(module)}


def test_every_annex_has_the_modules_that_it_names() -> None:
    parts = [part for rooms in (ANNEXES, BESIDE) for named in rooms.values() for part in named]
    assert [
        part for part in parts if not any(f"{module}.".startswith(f"{part}.") for module in OURS)
    ] == []


def test_only_the_folder_of_an_annex_has_no_layer() -> None:
    assert {folder for folder in ANNEX_FOLDERS if annex_of(folder) is None} == set()


def test_the_house_imports_an_annex_only_where_the_lists_say_so() -> None:
    house = [module for module in OURS if annex_of(module) is None and module not in JOINTS]
    assert {module: annexes for module in house if (annexes := annexes_of(module))} == STILL


def test_the_way_of_a_request_can_be_read_without_user_code() -> None:
    house = [module for module in OURS if annex_of(module) is None]
    with_user_code = {module for module in house if "user_code" in annexes_of(module)}
    assert with_user_code == JOINTS_WITH_USER_CODE


@pytest.mark.parametrize("annex", ANNEXES)
def test_an_annex_imports_only_the_annexes_that_it_may(annex: str) -> None:
    imported = [annexes_of(module) for module in OURS if annex_of(module) == annex]
    assert set().union(*imported) == ARROWS.get(annex, set())


def size(style: Style) -> str:
    """Return what a failure shows: lines have no bound, and stand beside what has one."""
    return (
        f"{style.num_tokens:,} tokens on {style.num_code_lines:,} lines of code "
        f"({style.num_lines:,} lines in all): {style.tokens_a_line:.2f} tokens a line, "
        f"{style.num_dense_functions} dense functions"
    )


def test_the_house_grows_only_with_its_number() -> None:
    house = style_of(path for module, path in OURS.items() if annex_of(module) is None)
    assert house.num_tokens <= MAX_TOKENS_OF_THE_HOUSE, size(house)


def test_the_product_grows_only_with_its_number() -> None:
    product = style_of(sources("lmi") + sources("handlers"))
    assert product.num_tokens <= MAX_TOKENS, size(product)


def test_the_product_is_not_packed() -> None:
    product = style_of(sources("lmi") + sources("handlers"))
    assert product.tokens_a_line <= MAX_TOKENS_A_LINE, size(product)
    assert product.num_dense_functions == 0, size(product)


def test_no_two_classes_have_one_name() -> None:
    classes = [
        node.name
        for path in OURS.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert [name for name, number in Counter(classes).items() if number > 1] == []
