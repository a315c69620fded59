"""Turns serving.properties, environment and command line into a Config, in steps that write into
one Values.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from lmi.adapters.files import with_adapters
from lmi.errors import BadConfiguration
from lmi.settings import (
    chat_templates,
    engine_choice,
    generation,
    llama_cpp,
    model_choice,
    model_names,
    other_names,
    placement,
    ports,
    secure_mode,
    strangers,
)
from lmi.settings.config import Config, EngineConfig, GenerationDefaults, ModelConfig, ServerConfig
from lmi.settings.gguf_choice import check_engine
from lmi.settings.given import Given, collect
from lmi.settings.handler import USER_CODE, announced
from lmi.settings.kinds import local_path
from lmi.settings.placement import Fetched
from lmi.settings.properties import Properties, read
from lmi.settings.served_folder import find_folder, named_folder
from lmi.settings.shown import Setting
from lmi.settings.table import MODEL, OPTIONS
from lmi.settings.values import Values
from lmi.shared.machine import Machine
from lmi.sources.fetches import FetchRequest, WantedSource, default_download_dir
from lmi.sources.source import GGUF, GgufSource, HubModel, parse, remote
from lmi.user_code.options import FORMATTER_WORDS
from lmi.user_code.settings import choose_code, choose_requirements, unrun_code, with_properties

# What an option of the server needs of an extra. Engines look for their own in `check` of their
# `Handler`.
LIBRARIES = {
    "option.otlp_traces_endpoint": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
}
# SageMaker waits so long for the answer of a real-time endpoint.
PLATFORM_WAITS_S = 60.0
# SageMaker kills a container so long after SIGTERM.
PLATFORM_KILLS_S = 30.0
# The time from the end of `drain_timeout` to the end of the last process.
END_S = 2.5
# The bodies of requests may take an eighth of the memory, where that is less than the default.
BODIES_PART = 8


@dataclass(frozen=True, slots=True)
class Resolved:
    """The configuration, the source of each value, and warnings and notes for the operator."""

    config: Config
    settings: tuple[Setting, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    # Lines for a log at DEBUG.
    details: tuple[str, ...] = ()
    # The request for the remote sources, without which the configuration is not final.
    request: FetchRequest | None = None

    @classmethod
    def of(cls, config: Config, values: Values, request: FetchRequest | None = None) -> Self:
        # The options of the table in its order, then the others that were given.
        keys = [option.key for option in OPTIONS]
        keys += sorted(values.picked.keys() - set(keys))
        settings = tuple(Setting.of(values, key) for key in keys)

        notes = list(values.notes)
        for setting in settings:
            for rival in setting.shadowed:
                counts = f"{setting.option}: {setting.value} ({setting.source}) counts"
                notes.append(f"{counts}, not {rival}")

        return cls(
            config,
            settings,
            tuple(values.warnings),
            tuple(notes),
            tuple(values.details),
            request,
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

    `fetched` has the folders of the sources that a former result asked for, `files` the file that a
    flag came from, by key.
    """
    cwd = cwd or Path.cwd()
    is_folder_asked = folder_text is not None or "load_models" in flags
    source = folder_text or named_folder(environ, flags, cwd)
    if source is not None and _is_source(source, cwd):
        if flags.get(MODEL, source) != source:
            raise BadConfiguration(
                f"{source} is to be served and {MODEL} is {flags[MODEL]}: allowed is one model"
            )

        return resolve(
            Properties(), environ, {**flags, MODEL: source}, cwd=cwd, fetched=fetched, files=files
        )

    if source is not None and source.endswith(GGUF) and (cwd / local_path(source)).is_file():
        path = str((cwd / local_path(source)).absolute())
        flags = {**flags, MODEL: path}
        return resolve(Properties(), environ, flags, cwd=cwd, fetched=fetched, files=files)

    folder = find_folder(source, cwd)
    properties = read(folder / "serving.properties") if folder else Properties()
    return resolve(
        properties,
        environ,
        flags,
        folder=folder,
        cwd=cwd,
        fetched=fetched,
        files=files,
        is_folder_asked=is_folder_asked,
    )


def _is_source(source: str, cwd: Path) -> bool:
    """Return whether what is to be served is no folder here but a source, such as OWNER/NAME."""
    exists = (cwd / source).exists()
    return remote(source, exists_locally=exists, needs_owner=True) is not None


def resolve(
    properties: Properties,
    environ: Mapping[str, str],
    flags: Mapping[str, str],
    *,
    folder: Path | None = None,
    cwd: Path = Path(),
    machine: Machine | None = None,
    fetched: Fetched | None = None,
    untrusted: Collection[Path] = (),
    files: Mapping[str, str] | None = None,
    counts: Callable[[Given], bool] = lambda given: True,
    is_folder_asked: bool = False,
) -> Resolved:
    """Settle every option. Raises BadConfiguration with one line for each fault, or else
    ModelUnusable.

    `flags` holds the texts of the command line by key, `files` the files that some of them came
    from. If `folder` is None, the demo is served. The result's `request` names the remote sources
    that are not in `fetched`. Until they are, its settings are what is known without them. Secure
    mode searches the folders of `untrusted` as it does those that were fetched. A given value for
    which `counts` is false is left out. `is_folder_asked` says that the command line names
    `folder`.
    """
    machine = machine or Machine.here(environ)
    values = Values(
        environ, folder, cwd, machine, announced(), fetched or {}, untrusted, is_folder_asked
    )
    values.warnings += properties.warnings
    other_names.report_variables(values)

    givens = collect(properties, environ, flags, files or {})
    givens += llama_cpp.givens(environ)
    with_meanings = list(other_names.with_meanings(filter(counts, givens), bool(machine.gpus)))
    placed, missing = placement.place(with_meanings, values)
    values.pick(placed)

    _warn_of_keys(values)
    ports.check_listeners(values)
    _check_libraries(values)
    other_names.report_unread_models(values)
    other_names.report_unused_variables(values)
    if not values.final("multi_model"):
        return _with_one_model(values, missing)

    secure_mode.check_operator(values)
    _choose_for_server(values)
    config = model_choice.without_model(values, flags)
    return Resolved.of(ports.choose_gateway_port(config), values)


def _warn_of_keys(values: Values) -> None:
    """Warn of keys on SageMaker, which does not pass them on."""
    has_keys = values.final("option.api_key") or values.final("option.api_key_file")
    if has_keys and _is_on_platform(values):
        values.warn(
            "option.api_key: SageMaker passes on neither Authorization nor x-api-key, so its "
            "requests get 401"
        )


def _is_on_platform(values: Values) -> bool:
    return any(name.startswith("SAGEMAKER_") for name in values.environ)


def _with_one_model(values: Values, missing: tuple[str, ...]) -> Resolved:
    """Choose what runs the model, then the model, and put the settings together."""
    code = choose_code(values)
    engine = engine_choice.choose_engine(values, code)
    is_code = engine.handler is USER_CODE
    engine_config = engine_choice.fit(values, engine)
    engine_config = ports.choose_ports(values, engine.handler.port_variables, engine_config)

    other_names.settle_forms(values)
    _choose_for_server(values)
    other_names.warn_of_some_engines(values, engine)
    other_names.note_variables_of_engines(values, engine)
    options = other_names.other_options(values, engine)
    engine_config = replace(engine_config, options=options)
    generation.check_options(values)
    values.stop_at_faults()

    secure_mode.check(values, model_choice.user_code_folders(values))
    strangers.check(values, engine, code)
    values.stop_at_faults()

    requirements = choose_requirements(values, code)
    if is_code:
        # User code loads a hub's id itself, as with the reference, and a GGUF file too.
        missing = tuple(
            text for text in missing if not isinstance(parse(text), HubModel | GgufSource)
        )

    else:
        check_engine(missing, engine.name, engine.handler)

    path = model_choice.choose_model(values, is_code, missing)
    is_here = str(path) not in missing
    if is_here:
        engine.handler.check_model(path)

    if not values.final("option.trust_remote_code"):
        values.notes += unrun_code(path)

    tells_tools = False
    if is_here and not is_code:
        tells_tools = chat_templates.choose_forms(values, path)

    defaults = GenerationDefaults()
    if not is_code:
        defaults = generation.choose_defaults(values, path)

    config = _config(values, engine, engine_config, path, defaults)
    config = replace(config, model=replace(config.model, tells_tools=tells_tools))
    config = ports.choose_gateway_port(config)
    if code is not None:
        code = with_properties(code, config, values, is_apart=path != values.folder)

    config = replace(config, user_code=code, requirements=requirements)
    config = with_adapters(config, values, engine.handler)

    sources = tuple(WantedSource.of(source, config) for source in missing)
    request = FetchRequest(sources=sources) if sources else None
    return Resolved.of(config, values, request)


def _check_libraries(values: Values) -> None:
    """Refuse an option of the server that needs an extra which is not installed: a front end would
    end much later.
    """
    for key, modules in LIBRARIES.items():
        if key not in values or all(map(_is_there, modules)):
            continue

        library = modules[0].partition(".")[0]
        values.faults.append(
            f"{values.how_given(key).said}: the library {library} is not installed"
        )


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        # Not even its parent is there.
        return False


def _choose_for_server(values: Values) -> None:
    """Choose the address, front ends, room for bodies and the folder for downloads, which becomes
    an absolute path.
    """
    _choose_body_memory(values)
    if _is_on_platform(values):
        _bound_queue_wait(values)
        _check_end(values)

    if values.machine.is_container:
        values.choose("host", "0.0.0.0", "this is a container")

    num_front_ends = min(4, max(1, values.machine.num_cores // 2))
    values.choose("frontend_workers", num_front_ends, "half of the cores, 1 to 4")

    key = "download_dir"
    if key in values:
        values.settle(key, str((values.cwd / values.given(key)).absolute()), "absolute")

    values.choose(key, str(default_download_dir(values.environ).absolute()), "the user's cache")


def _choose_body_memory(values: Values) -> None:
    """Choose the room for bodies, which is enough for at least one body of the allowed size."""
    key = "max_body_memory"
    part = values.machine.memory_bytes // BODIES_PART
    if part < values.final(key):
        values.choose(key, part, f"1/{BODIES_PART} of the memory")

    largest = values.final("max_request_size")
    if values.final(key) >= largest:
        return

    if key in values:
        values.warn(
            f"{values.how_given(key).said}: less than max_request_size, so {largest} bytes count"
        )

    values.settle(key, largest, "max_request_size")


def _bound_queue_wait(values: Values) -> None:
    """Let no request wait longer than the platform does, where it waits for an answer."""
    key = "max_queue_wait"
    has_time = values.final("batch_transform") or values.final("buffer_streams")
    if has_time or values.final(key) <= PLATFORM_WAITS_S:
        return

    waits = f"SageMaker waits {PLATFORM_WAITS_S:g} s for an answer, so they count"
    values.warn(f"{values.how_given(key).said}: {waits}")
    values.settle(key, PLATFORM_WAITS_S, "SageMaker")


def _check_end(values: Values) -> None:
    """Warn of a drain that the platform cuts."""
    delay_s = values.final("drain_delay")
    timeout_s = values.final("drain_timeout")
    if delay_s + timeout_s + END_S > PLATFORM_KILLS_S:
        both = f"drain_delay={delay_s:g}, drain_timeout={timeout_s:g}"
        left_s = PLATFORM_KILLS_S - END_S
        values.warn(
            f"{both}: SageMaker kills a container {PLATFORM_KILLS_S:g} s after SIGTERM, both have "
            f"{left_s:g} s"
        )


def _config(
    values: Values,
    engine: engine_choice.ChosenEngine,
    engine_config: EngineConfig,
    path: Path,
    defaults: GenerationDefaults,
) -> Config:
    option_sources: dict[str, str] = {}
    for key, winner in values.picked.items():
        if key.startswith("option."):
            option_sources[winner.given.key.removeprefix("option.")] = winner.given.source

    has_batch_size = engine_choice.BATCH in values or "batch_size" in values
    model = values.fields("model")
    if model.get("output_formatter") not in FORMATTER_WORDS:
        model.pop("output_formatter", None)

    return Config(
        server=ServerConfig(
            **values.fields("server"), keeps_queue_short="max_queue_wait" not in values
        ),
        model=ModelConfig(
            path=str(path.resolve()),
            sources=model_names.sources_of(values, path),
            dynamic_batch=engine.has_dynamic_batch,
            sampling_defaults=engine.handler.sampling_defaults,
            generation_defaults=defaults,
            **model,
        ),
        engine=replace(
            engine_config, option_sources=option_sources, is_batch_default=not has_batch_size
        ),
    )
