"""Turns serving.properties, environment and command line into a Config.

Each step takes the values so far, returns them with its own choices, and adds to the problems.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lmi.errors import BadConfiguration
from lmi.settings import reference, secure_mode
from lmi.settings.adapters import OPTION, by_name, check_files, folders_beside, is_enabled
from lmi.settings.config import Config, EngineConfig, ModelConfig, RequirementsConfig, ServerConfig, UserCodeConfig
from lmi.settings.engine_choice import (
    KEY,
    TASKS,
    ChosenEngine,
    Replicas,
    choose_defaults,
    choose_degree,
    choose_engine,
    choose_gpus,
    choose_replicas,
    fit_beams,
    other_options,
    read_meanings,
    warn_of_some_engines,
)
from lmi.settings.handler import USER_CODE, Handler, Machine, announced
from lmi.settings.kinds import (
    ADDRESS,
    FORMATTER_WORDS,
    MODELS,
    REASONING_FORMS,
    TOOL_CALL_FORMS,
    NamedModel,
    local_path,
)
from lmi.settings.model_choice import MODEL, Fetched, choose_model, is_remote_folder, left_to_code, place
from lmi.settings.model_folder import find_folder, user_code_folders
from lmi.settings.options import is_of_server
from lmi.settings.ports import choose_gateway_port, choose_ports
from lmi.settings.properties import Properties, read
from lmi.settings.user_code import choose_code, choose_requirements, unrun_code
from lmi.settings.values import (
    FILE,
    Given,
    Problems,
    Resolved,
    Values,
    collect,
    pick,
    settings,
    shadows,
    unused_of_platform,
)
from lmi.sources.place import default_download_dir
from lmi.sources.request import FetchRequest, WantedSource


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the settings depend on beside the texts that were given."""

    environ: Mapping[str, str]
    folder: Path | None  # that is served; None: none was named
    cwd: Path
    machine: Machine
    handlers: Mapping[str, Handler]  # that are installed, by name
    fetched: Fetched
    untrusted: Collection[Path]  # folders that secure mode searches as it does those that were fetched


def resolve_folder(
    asked: str | None,
    environ: Mapping[str, str],
    flags: Mapping[str, str],
    cwd: Path | None = None,
    fetched: Fetched | None = None,
) -> Resolved:
    """Return the settings that `lmi serve ASKED` runs with. Raises BadConfiguration or ModelUnusable.

    `fetched` has the folders of the sources that a former result asked for.
    """
    cwd = cwd or Path.cwd()
    asked = asked or _named_folder(environ, flags, cwd)
    if asked is not None and is_remote_folder(asked, cwd):
        return resolve(Properties(), environ, _with_model(flags, asked), cwd=cwd, fetched=fetched)
    folder = find_folder(asked, cwd)
    file = folder / "serving.properties" if folder else None
    properties = read(file) if file and file.exists() else Properties()
    return resolve(properties, environ, flags, folder=folder, cwd=cwd, fetched=fetched)


def _with_model(flags: Mapping[str, str], asked: str) -> dict[str, str]:
    """Return the flags with a remote source as the model. Raises BadConfiguration if they name another one."""
    if flags.get(MODEL, asked) != asked:
        raise BadConfiguration(f"{asked} is to be served and {MODEL} is {flags[MODEL]}: allowed is one model")
    return {**flags, MODEL: asked}


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
) -> Resolved:
    """Settle every option. Raises BadConfiguration with one line for each fault, or else ModelUnusable.

    `flags` holds the texts of the command line by key. If `folder` is None, the demo is served. The result's `request`
    names the remote sources that are not in `fetched`. Until they are, its settings are what is known without them.
    Secure mode searches the folders of `untrusted` as it does those that were fetched.
    """
    warnings = [*properties.warnings, *reference.warnings(environ)]
    problems = Problems(warnings=warnings, details=unused_of_platform(environ))
    here = Surroundings(environ, folder, cwd, machine or Machine.here(environ), announced(), fetched or {}, untrusted)
    placed = place(_expand(collect(properties, environ, flags), here.machine), folder, cwd, here.fetched, problems)
    values = Values(pick(placed.givens, problems))
    if values.final("multi_model"):
        return _without_model(values, flags, here, problems)
    return _with_one_model(values, placed.missing, here, problems)


def _with_one_model(values: Values, missing: tuple[str, ...], here: Surroundings, problems: Problems) -> Resolved:
    """Choose what runs the model, then the model, and put the settings together."""
    code = choose_code(values, here.folder, here.cwd, problems)
    values, engine, replicas = _choose_engine(values, code, here, problems)
    values = _choose_for_server(_choose_forms(values, problems), here, problems)
    warn_of_some_engines(values, engine, here.handlers, problems)
    options = other_options(values, engine, problems)
    problems.stop_at_faults()
    requirements = _check_code(values, code, here, problems)
    missing = left_to_code(missing) if engine.handler is USER_CODE else missing
    values, path = _choose_model(values, engine, missing, here, problems)
    config = replace(_config(values, engine, replicas, options, path), requirements=requirements)
    config = choose_gateway_port(config)
    if code is not None:
        config = replace(config, user_code=_with_properties(code, config, values, is_apart=path != here.folder))
    config = _with_adapters(config, engine, here.folder, problems)
    return _resolved(config, values, problems, _request(missing, config))


def _choose_engine(
    values: Values, code: UserCodeConfig | None, here: Surroundings, problems: Problems
) -> tuple[Values, ChosenEngine, Replicas]:
    """Choose the engine, its accelerators, and how many processes of it there are."""
    engine = choose_engine(values, code, here.machine, here.handlers, problems)
    problems.warnings += [f"{engine.name}: {engine.handler.caveat}"] if engine.handler.caveat else []
    values = read_meanings(values.settle(KEY, engine.name, engine.reason), engine, problems)
    values = choose_defaults(values, engine, problems)
    values = fit_beams(values, problems)
    gpus = choose_gpus(values, here.machine, problems)
    values = choose_degree(values, engine, gpus)
    replicas = choose_replicas(values, engine, gpus, problems)
    replicas = choose_ports(values, engine, replicas, here.environ, problems)
    _refuse_other_tasks(values, engine, problems)
    return values, engine, replicas


def _check_code(
    values: Values, code: UserCodeConfig | None, here: Surroundings, problems: Problems
) -> RequirementsConfig | None:
    """Check what secure mode refuses. Returns what must be installed for the code that comes with the model."""
    folders = user_code_folders(values.given("option.model_id"), here.folder, here.cwd)
    untrusted = (*here.fetched.values(), *here.untrusted)
    secure_mode.check(values, here.folder, folders, untrusted, here.cwd)
    return choose_requirements(values, code, folders, problems)


def _choose_model(
    values: Values, engine: ChosenEngine, missing: tuple[str, ...], here: Surroundings, problems: Problems
) -> tuple[Values, Path]:
    """Return the values with the model's name, and its folder."""
    names = {str(path): source for source, path in here.fetched.items()} | {text: text for text in missing}
    values, path = choose_model(values, here.folder, here.cwd, engine.handler is USER_CODE, names, problems)
    if str(path) not in missing:
        engine.handler.check_model(path)
    problems.notes += unrun_code(path) if not values.final("option.trust_remote_code") else []
    return values, path


def _resolved(config: Config, values: Values, problems: Problems, request: FetchRequest | None = None) -> Resolved:
    rows = settings(values)
    notes = (*problems.notes, *shadows(rows))
    return Resolved(config, rows, tuple(problems.warnings), notes, tuple(problems.details), request)


def _request(missing: tuple[str, ...], config: Config) -> FetchRequest | None:
    """Return what must be fetched before the model can be served, or None."""
    if not missing:
        return None
    return FetchRequest(
        sources=tuple(
            WantedSource(
                source=source,
                revision=config.model.revision,
                allow_pickle=config.engine.allow_pickle,
                trust_remote_code=config.engine.trust_remote_code,
                download_dir=config.server.download_dir,
            )
            for source in missing
        )
    )


def _without_model(values: Values, flags: Mapping[str, str], here: Surroundings, problems: Problems) -> Resolved:
    """Return the settings of a server with several models. Each model's are resolved when it is loaded."""
    secure_mode.check_operator(values)
    values = _choose_for_server(values, here, problems)
    for picked in values.picked.values():
        if picked.given.key in (MODEL, "load_models"):
            problems.warnings.append(f"{picked.given.said}: not served, multi_model starts without a model")
        elif picked.given.rank[0] == FILE and not is_of_server(picked.given.key):
            problems.notes.append(f"{picked.given.place}: no effect with multi_model, each model has its own file")
    problems.stop_at_faults()
    of_models = {key: text for key, text in flags.items() if not is_of_server(key)}
    server = ServerConfig(**values.fields("server"), model_flags=of_models)
    config = Config(server=server, model=ModelConfig(path="", name="model"), engine=EngineConfig())
    return _resolved(choose_gateway_port(config), values, problems)


def _named_folder(environ: Mapping[str, str], flags: Mapping[str, str], cwd: Path) -> str | None:
    """Return the folder that `load_models` names, or None.

    Returns None too if the folder does not exist and option.model_id names the model.
    """
    givens = sorted(collect(Properties(), environ, flags), key=lambda given: given.rank)
    texts = [given.text for given in givens if given.key == "load_models"]
    models: tuple[NamedModel, ...] = ()
    with suppress(ValueError):  # the row of load_models reports a bad text
        models = MODELS.parse(texts[0]) if texts else ()
    is_named = any(given.key == "option.model_id" for given in givens)
    if not models or (is_named and not (cwd / local_path(models[0].url)).is_dir()):
        return None
    return models[0].url


def _expand(givens: list[Given], machine: Machine) -> list[Given]:
    """Add the options that others imply.

    gpu.minWorkers means minWorkers if a GPU is visible, and cpu.minWorkers if none is. The other of the two is dropped.
    """
    expanded = []
    for given in givens:
        prefix, _, rest = given.key.partition(".")
        if prefix not in ("gpu", "cpu"):
            expanded += [given, *_meant(given)]
        elif (prefix == "gpu") == bool(machine.gpus):
            expanded.append(replace(given, key=rest, rank=(given.rank[0], -1)))
    return expanded


def _meant(given: Given) -> list[Given]:
    """Return the options that `given` implies: an address implies host and port, and load_models may name an engine."""
    texts: dict[str, str] = {}
    with suppress(ValueError, IndexError):  # the option's row reports a bad text; there may be no model
        if given.key == "inference_address":
            host, port = ADDRESS.parse(given.text)
            texts = {"host": host, "port": str(port)}
        if given.key == "load_models":
            texts = {"engine": MODELS.parse(given.text)[0].engine}
    return [replace(given, key=key, text=text, rank=(given.rank[0], 1)) for key, text in texts.items() if text]


def _choose_forms(values: Values, problems: Problems) -> Values:
    """Leave tool calls and reasoning in the text, with a warning, if their form is not read here."""
    for key, known, instead in (
        ("option.tool_call_parser", TOOL_CALL_FORMS, "text"),
        ("option.reasoning_parser", REASONING_FORMS, None),
    ):
        name = values.given(key)
        if name is not None and name not in known:
            read_here = ", ".join(one for one in known if one != instead)
            said = f"{values.how_given(key).said}: this form stays plain text, read here are {read_here}"
            problems.warnings.append(said)
            values = values.settle(key, instead, "not read here")
    return values


def _refuse_other_tasks(values: Values, engine: ChosenEngine, problems: Problems) -> None:
    task = values.given("option.task", "auto")
    if task.lower().replace("_", "-") not in TASKS and engine.handler is not USER_CODE:
        only = "engines here generate text and do nothing else; a model.py can"
        values.refuse("option.task", f"{', '.join(TASKS)} ({only})", problems)


def _fit_body_memory(values: Values, problems: Problems) -> Values:
    """Make room for at least one body of the allowed size."""
    key, largest = "max_body_memory", values.final("max_request_size")
    if values.final(key) >= largest:
        return values
    if key in values:
        said = values.how_given(key).said
        problems.warnings.append(f"{said}: less than max_request_size, so {largest} bytes count")
    return values.settle(key, largest, "max_request_size")


def _choose_for_server(values: Values, here: Surroundings, problems: Problems) -> Values:
    """Choose front ends, room for bodies and the folder for downloads, which becomes an absolute path."""
    values = _fit_body_memory(values, problems)
    num_workers = min(4, max(1, here.machine.num_cores // 2))
    values = values.choose("frontend_workers", num_workers, "half of the cores, 1 to 4")
    key = "download_dir"
    if key in values:
        return values.settle(key, str((here.cwd / values.given(key)).absolute()), "absolute")
    return values.choose(key, str(default_download_dir(here.environ).absolute()), "the user's cache")


def _config(values: Values, engine: ChosenEngine, replicas: Replicas, options: dict[str, str], path: Path) -> Config:
    model = values.fields("model")
    if model.get("output_formatter") not in FORMATTER_WORDS:
        model.pop("output_formatter", None)
    return Config(
        server=ServerConfig(**values.fields("server")),
        model=ModelConfig(
            path=str(path.resolve()),
            dynamic_batch=engine.has_dynamic_batch,
            sampling_defaults=engine.handler.sampling_defaults,
            **model,
        ),
        engine=EngineConfig(
            num_engines=replicas.num_engines,
            device_ids=replicas.device_ids,
            ports=replicas.ports,
            options=options,
            option_sources=_option_sources(values),
            **values.fields("engine"),
        ),
    )


def _with_adapters(config: Config, engine: ChosenEngine, folder: Path | None, problems: Problems) -> Config:
    """Add the adapters beside the model or serving.properties, or warn that they are not loaded."""
    model = config.model
    found = folders_beside(*filter(None, (folder, Path(model.path))))
    if not found or config.is_user_code:
        return config
    if not is_enabled(config.engine.options) or OPTION in engine.handler.unused:
        said = f"the adapters in {found[0].parent} are not loaded"
        problems.warnings.append(f"{said}: {OPTION}=true loads them, on an engine that has adapters")
        return config
    for path in found:
        secure_mode.check_adapter(config.server, path, path.parent.parent)
        check_files(path, allow_pickle=config.engine.allow_pickle)
    return replace(config, model=replace(model, adapters=by_name(found, model.names)))


def _option_sources(values: Values) -> dict[str, str]:
    """Return the source of each option.* that was given, by name without `option.`."""
    options = [(key, picked) for key, picked in values.picked.items() if key.startswith("option.")]
    return {key.removeprefix("option."): picked.given.source for key, picked in options}


def _with_properties(code: UserCodeConfig, config: Config, values: Values, *, is_apart: bool) -> UserCodeConfig:
    """Add the properties of the handler's first call: every option but secrets, and the model's folder.

    `is_apart` says that option.model_id names a local folder.
    """
    path, engine = config.model.path, config.engine
    given = [picked.given for picked in values.picked.values() if picked.given.key.startswith("option.")]
    options = {row.key.removeprefix("option."): row.text for row in given if row.shown != "***"}
    options.setdefault("tensor_parallel_degree", str(engine.tensor_parallel_degree))
    if is_apart or "model_id" not in options:
        options["model_id"] = path
    properties = options | {"model_dir": path, "device_id": "0" if engine.device_ids else "-1"}
    return replace(code, properties=properties)
