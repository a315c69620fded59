"""Turns serving.properties, environment and command line into a Config, in steps. Each step writes
a part of one Resolution.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from lmi.adapters.files import choose_adapters
from lmi.errors import BadConfiguration
from lmi.settings import (
    chat_templates,
    engine_choice,
    engine_flags,
    generation,
    images,
    llama_cpp,
    model_choice,
    other_names,
    placement,
    ports,
    sagemaker,
    secure_mode,
    server_choice,
    sglang,
    strangers,
)
from lmi.settings.chat_templates import REASONING, TOOL_CALLS
from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig
from lmi.settings.engine_choice import BATCH, BEAMS, KEY, TENSOR
from lmi.settings.given import collect
from lmi.settings.kinds import local_path
from lmi.settings.model_names import ALIASES, NAME, sources_of
from lmi.settings.properties import read
from lmi.settings.served_folder import find_folder, named_folder
from lmi.settings.shown import Setting
from lmi.settings.start import Fetched, StartInputs
from lmi.settings.steps import GIVEN, Resolution, SettingsStep, run
from lmi.settings.table import MODEL, OPTIONS, is_of_server
from lmi.settings.values import Values
from lmi.shared.machine import Machine
from lmi.sources.fetches import FetchRequest, WantedSource
from lmi.sources.source import GGUF, remote
from lmi.user_code import settings as user_code
from lmi.user_code.options import FORMATTER_WORDS, UserCodeConfig


@dataclass(frozen=True, slots=True)
class Resolved:
    """The configuration, the source of each value, and what the operator should know."""

    config: Config
    settings: tuple[Setting, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    # Lines for a log at DEBUG.
    details: tuple[str, ...] = ()
    # The request for the remote sources that are missing. Without them the configuration is not
    # final.
    request: FetchRequest | None = None

    @classmethod
    def of(cls, resolution: Resolution) -> Self:
        """Return what the steps have written."""
        values = resolution.values
        # The options of the table in its order, then the others that were given.
        keys = [option.key for option in OPTIONS]
        keys += sorted(values.picked.keys() - set(keys))
        settings = tuple(Setting.of(values, key) for key in keys)

        notes = list(values.notes)
        for setting in settings:
            for rival in setting.shadowed:
                counts = f"{setting.option}: {setting.value} ({setting.source}) counts"
                notes.append(f"{counts}, not {rival}")

        config = resolution.config
        sources = tuple(WantedSource.of(source, config) for source in resolution.missing)
        return cls(
            config,
            settings,
            tuple(values.warnings),
            tuple(notes),
            tuple(values.details),
            request=FetchRequest(sources=sources) if sources else None,
        )


def resolve_folder(
    folder_text: str | None,
    environ: Mapping[str, str],
    flags: Mapping[str, str],
    cwd: Path | None = None,
    fetched: Fetched | None = None,
    files: Mapping[str, str] | None = None,
) -> Resolved:
    """Return the settings that `lmi serve FOLDER_TEXT` runs with. Raises BadConfiguration or
    ModelUnusable.

    `fetched` has the folders of the sources that a former result asked for. `files` has the files
    that flags came from, by key.
    """
    cwd = cwd or Path.cwd()
    start = StartInputs(
        cwd=cwd,
        machine=Machine.here(environ),
        fetched=fetched or {},
        environ=environ,
        flags=flags,
        files=files or {},
    )
    text = folder_text or named_folder(environ, flags, cwd)
    if text is not None and _is_source(text, cwd):
        if flags.get(MODEL, text) != text:
            raise BadConfiguration(
                f"{text} is to be served and {MODEL} is {flags[MODEL]}: allowed is one model"
            )

        return resolve(replace(start, flags={**flags, MODEL: text}))

    if text is not None and text.endswith(GGUF):
        file = cwd / local_path(text)
        if file.is_file():
            return resolve(replace(start, flags={**flags, MODEL: str(file.absolute())}))

    folder = find_folder(text, cwd)
    if folder is not None:
        start = replace(start, folder=folder, properties=read(folder / "serving.properties"))

    is_folder_asked = folder_text is not None or "load_models" in flags
    return resolve(replace(start, is_folder_asked=is_folder_asked))


def _is_source(text: str, cwd: Path) -> bool:
    """Return whether what is to be served is no folder here but a source, such as OWNER/NAME."""
    exists = (cwd / text).exists()
    return remote(text, exists_locally=exists, needs_owner=True) is not None


def resolve(start: StartInputs) -> Resolved:
    """Settle every option, by the steps at the end of this file. Raises BadConfiguration with one
    line for each fault, or ModelUnusable if there is none.

    The result's `request` names the remote sources that are not in `start.fetched`. While some are
    missing, the settings are what is known without them.
    """
    resolution = Resolution(start, Values(start))
    run(FIRST_STEPS, resolution)
    run(further_steps(resolution.values), resolution)
    return Resolved.of(resolution)


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


def _freeze_one_model(resolution: Resolution) -> None:
    """Put all that was settled together, frozen."""
    values = resolution.values
    model = values.fields("model")
    if model.get("output_formatter") not in FORMATTER_WORDS:
        model.pop("output_formatter", None)

    engine = resolution.chosen_engine
    resolution.config = Config(
        server=_server(resolution),
        model=ModelConfig(
            path=str(resolution.path.resolve()),
            sources=sources_of(resolution),
            adapters=resolution.adapters,
            dynamic_batch=engine.has_dynamic_batch,
            tells_tools=resolution.tells_tools,
            sampling_defaults=engine.handler.sampling_defaults,
            generation_defaults=resolution.generation_defaults,
            **model,
        ),
        engine=EngineConfig(
            num_engines=resolution.num_engines,
            ports=resolution.ports,
            device_ids=resolution.device_ids,
            options=resolution.engine_options,
            option_sources=_sources_of_options(values),
            is_batch_default=BATCH not in values and "batch_size" not in values,
            **values.fields("engine"),
        ),
        user_code=_code(resolution),
        requirements=resolution.requirements,
    )


def _code(resolution: Resolution) -> UserCodeConfig | None:
    """Return the settings of user code, with what its functions get."""
    if resolution.code is None:
        return None

    return replace(resolution.code, properties=resolution.code_properties)


def _freeze_several_models(resolution: Resolution) -> None:
    """Put together, frozen, what was settled of a server that starts without a model."""
    flags = resolution.start.flags
    of_models = {key: text for key, text in flags.items() if not is_of_server(key)}
    resolution.config = Config(
        server=replace(_server(resolution), model_flags=of_models),
        model=ModelConfig(path="", name="model"),
        engine=EngineConfig(),
    )


def _server(resolution: Resolution) -> ServerConfig:
    values = resolution.values
    fields = {**values.fields("server"), "gateway_port": resolution.gateway_port}
    return ServerConfig(**fields, keeps_queue_short="max_queue_wait" not in values)


def _sources_of_options(values: Values) -> dict[str, str]:
    """Return where each option of a model or an engine was given, by name without `option.`."""
    sources: dict[str, str] = {}
    for key, winner in values.picked.items():
        if key.startswith("option."):
            sources[winner.given.key.removeprefix("option.")] = winner.given.source

    return sources


PREFILL = "option.max_rolling_batch_prefill_tokens"

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
    SettingsStep(engine_choice.bound_beams, reads=(BATCH, BEAMS), writes=(BEAMS,)),
    SettingsStep(engine_choice.choose_gpus, writes=("gpus",)),
    SettingsStep(
        engine_choice.place_replicas,
        reads=("chosen_engine", "gpus", "engine.*"),
        writes=(TENSOR, "num_engines", "device_ids"),
    ),
    SettingsStep(engine_choice.check_task, reads=("chosen_engine",)),
    SettingsStep(engine_choice.check_stored_prompts),
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
        _freeze_one_model,
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
    SettingsStep(_freeze_several_models, reads=("server.*", "gateway_port"), writes=("config",)),
)
