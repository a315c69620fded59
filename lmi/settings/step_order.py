"""The steps that turn what was given into a Config, in their order.

Each row says what the step reads and writes of what other steps choose. Most steps are functions in
the file of their subject.
"""

from lmi.adapters.files import choose_adapters
from lmi.settings import (
    chat_templates,
    engine_choice,
    engine_flags,
    engine_rules,
    freeze,
    generation,
    images,
    llama_cpp,
    model_choice,
    other_names,
    placement,
    ports,
    replicas,
    sagemaker,
    secure_mode,
    server_choice,
    sglang,
    strangers,
    tasks,
)
from lmi.settings.chat_templates import REASONING, TOOL_CALLS
from lmi.settings.engine_choice import KEY
from lmi.settings.engine_rules import BATCH, BEAMS
from lmi.settings.given import collect
from lmi.settings.model_names import ALIASES, NAME
from lmi.settings.replicas import TENSOR
from lmi.settings.steps import GIVEN, Resolution, SettingsStep
from lmi.settings.table import MODEL
from lmi.settings.values import Values
from lmi.user_code import settings as user_code

PREFILL = "option.max_rolling_batch_prefill_tokens"


def further_steps(values: Values) -> tuple[SettingsStep, ...]:
    """Return the steps after the first ones."""
    if values.final("multi_model"):
        return STEPS_OF_SEVERAL_MODELS

    return STEPS_OF_ONE_MODEL


def _collect_values(resolution: Resolution) -> None:
    """Collect what was given, with the options that others imply."""
    start = resolution.start
    resolution.values.warnings += start.properties.warnings
    givens = collect(start.properties, start.environ, start.flags, start.files)
    givens += images.givens(start.environ)
    counting = filter(start.counts, givens)
    resolution.givens = list(other_names.with_meanings(counting, bool(start.machine.gpus)))


def _pick_values(resolution: Resolution) -> None:
    """Pick what counts of the values that were given for each option."""
    resolution.values.pick(resolution.givens)


FIRST_STEPS = (
    SettingsStep(other_names.report_variables),
    SettingsStep(_collect_values, writes=("givens",)),
    SettingsStep(placement.place, reads=("givens",), writes=("givens", "fetched", "missing")),
    SettingsStep(_pick_values, reads=("givens",), writes=(GIVEN,)),
    SettingsStep(
        server_choice.choose_by_machine, writes=("host", "frontend_workers", "max_body_memory")
    ),
    SettingsStep(sagemaker.warn_of_keys),
    SettingsStep(server_choice.check_takeover),
    SettingsStep(ports.check_listeners),
    SettingsStep(server_choice.check_libraries),
    SettingsStep(llama_cpp.report),
    SettingsStep(engine_flags.report),
    SettingsStep(sglang.report),
    SettingsStep(other_names.report_unread_models),
    SettingsStep(other_names.report_unused_variables),
)

# Steps that depend on nothing of a model.
SERVER_STEPS = (
    SettingsStep(
        server_choice.fit_body_memory, reads=("max_body_memory",), writes=("max_body_memory",)
    ),
    SettingsStep(sagemaker.bound_queue_wait, reads=("max_queue_wait",), writes=("max_queue_wait",)),
    SettingsStep(sagemaker.warn_of_drain),
    SettingsStep(server_choice.choose_download_dir, writes=("download_dir",)),
)

STEPS_OF_ONE_MODEL = (
    # What runs the model.
    SettingsStep(user_code.choose_code, reads=("fetched",), writes=("code",)),
    SettingsStep(engine_choice.choose_engine, reads=("code",), writes=("chosen_engine",)),
    SettingsStep(engine_choice.settle_engine, reads=("chosen_engine",), writes=(KEY,)),
    # Engines have further names for options. From here on each option has one key.
    SettingsStep(engine_choice.read_meanings, reads=("chosen_engine",), writes=(GIVEN,)),
    SettingsStep(
        engine_choice.choose_engine_defaults,
        reads=("chosen_engine",),
        writes=(BATCH, PREFILL, BEAMS),
    ),
    SettingsStep(engine_rules.bound_beams, reads=(BATCH, BEAMS), writes=(BEAMS,)),
    SettingsStep(replicas.choose_gpus, writes=("gpus",)),
    SettingsStep(
        replicas.place_replicas,
        reads=("chosen_engine", "gpus", "engine.*"),
        writes=(TENSOR, "num_engines", "device_ids"),
    ),
    SettingsStep(tasks.check_task, reads=("chosen_engine",)),
    SettingsStep(engine_rules.check_stored_prompts),
    SettingsStep(
        ports.choose_ports,
        reads=("chosen_engine", "num_engines"),
        writes=("ports", "given_ports"),
    ),
    SettingsStep(other_names.settle_forms, writes=(TOOL_CALLS, REASONING)),
    *SERVER_STEPS,
    SettingsStep(other_names.warn_of_some_engines, reads=("chosen_engine",)),
    SettingsStep(other_names.note_variables_of_engines, reads=("chosen_engine",)),
    SettingsStep(
        other_names.choose_engine_options, reads=("chosen_engine",), writes=("engine_options",)
    ),
    # All faults of options are reported together. What secure mode refuses, and a fault of the
    # model's files, each end the start by themselves.
    SettingsStep(generation.check_options, reports_faults=True),
    SettingsStep(secure_mode.check, reads=("fetched", "download_dir", "code")),
    # What a stranger's file may not do is reported before anything else of it counts.
    SettingsStep(strangers.check, reads=("chosen_engine", "code"), reports_faults=True),
    # The model.
    SettingsStep(
        user_code.choose_requirements, reads=("code", "download_dir"), writes=("requirements",)
    ),
    SettingsStep(
        placement.check_sources, reads=("missing", "code", "chosen_engine"), writes=("missing",)
    ),
    SettingsStep(
        model_choice.choose_model,
        reads=("missing", "fetched", "code"),
        writes=("path", MODEL, NAME, ALIASES),
    ),
    SettingsStep(model_choice.check_model, reads=("path", "missing", "chosen_engine")),
    SettingsStep(user_code.note_unrun_code, reads=("path",)),
    SettingsStep(
        chat_templates.choose_forms,
        reads=("path", "missing", "code", TOOL_CALLS),
        writes=("tells_tools", TOOL_CALLS, REASONING),
    ),
    SettingsStep(
        generation.choose_defaults, reads=("path", "code"), writes=("generation_defaults",)
    ),
    SettingsStep(
        ports.choose_gateway_port, reads=("ports", "given_ports"), writes=("gateway_port",)
    ),
    SettingsStep(
        user_code.choose_properties,
        reads=("path", "device_ids", TENSOR),
        writes=("code_properties",),
    ),
    SettingsStep(
        choose_adapters,
        reads=("path", "code", "chosen_engine", "engine_options", "server.*", NAME, ALIASES),
        writes=("adapters",),
    ),
    SettingsStep(
        freeze.freeze_one_model,
        reads=(
            "server.*",
            "gateway_port",
            "model.*",
            "path",
            "fetched",
            "adapters",
            "tells_tools",
            "generation_defaults",
            "engine.*",
            "chosen_engine",
            "num_engines",
            "ports",
            "device_ids",
            "engine_options",
            "code",
            "code_properties",
            "requirements",
        ),
        writes=("config",),
    ),
)

# Each of several models is resolved when it is loaded.
STEPS_OF_SEVERAL_MODELS = (
    SettingsStep(secure_mode.check_operator),
    SettingsStep(user_code.refuse_handlers_of_several),
    *SERVER_STEPS,
    # The only later step that refuses an option is that of the gateway's port.
    SettingsStep(model_choice.warn_of_models, writes=("missing",), reports_faults=True),
    SettingsStep(
        ports.choose_gateway_port, reads=("ports", "given_ports"), writes=("gateway_port",)
    ),
    SettingsStep(
        freeze.freeze_several_models, reads=("server.*", "gateway_port"), writes=("config",)
    ),
)
