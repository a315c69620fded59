"""Every setting of lmi, resolved once.

Frozen dataclasses that the supervisor fills from command line, environment and serving.properties and hands to its
children as one JSON file. Nobody else reads the environment. A default stands here and nowhere else: what depends on
the machine or the folder is chosen in `choices.py`, and `options.py` is the table of names.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from lmi.errors import BadConfiguration, ModelUnusable, shorten
from lmi.settings import choices, user_code
from lmi.settings.choices import Machine
from lmi.settings.model_urls import NamedModel, local_path
from lmi.settings.options import (
    ADDRESS,
    ENGINE_KEYS,
    ENTRY_POINT,
    FORMATTER_WORDS,
    GENERATION_TASKS,
    LORA_KEYS,
    MODELS,
    OF_ONE_ENGINE,
    OPTIONS,
    REASONING_FORMS,
    REASONS,
    TOOL_CALL_FORMS,
    TRANSLATED_FOR_VLLM,
    WITHOUT_EFFECT,
    elsewhere,
    find,
)
from lmi.settings.properties import Properties, read
from lmi.settings.sources import Findings, Given, Picked, closest, collect, fault, pick

MAX_NUM_SEQUENCES = 64  # of the embedded engine; others know their own
MAX_PREFILL_TOKENS = 256
ONE_DEVICE = f"1 on {choices.EMBEDDED}, which runs on one device; more with option.rolling_batch=vllm, once installed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The front end and the supervisor."""

    host: str = "0.0.0.0"
    port: int = 8080
    frontend_workers: int = 1
    job_queue_size: int = 1000  # waiting sequences
    max_request_sequences: int = 512  # prompts times n or best_of
    max_request_size: int = 64 << 20  # bytes of a body
    max_body_memory: int = 256 << 20  # bytes of all bodies in a front end
    predict_timeout_s: float | None = None  # a whole request
    drain_timeout_s: float = 25.0
    stall_timeout_s: float = 30.0  # a client that does not read
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    allow_multi_status: bool = False
    log_level: str = "INFO"
    log_format: str = "auto"  # auto (text on a terminal, else json), text, json


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model as clients see it. `path` is a local folder by now."""

    path: str
    name: str
    aliases: tuple[str, ...] = ()  # further names under which it answers
    adapters: tuple[str, ...] = ()  # names of its LoRA adapters; a front end fills in those that are loaded
    version: str = "1"
    output_formatter: str | None = None  # json, jsonlines, sse; None: by the request
    tgi_compat: bool = False
    dynamic_batch: bool = False  # option.rolling_batch=disable
    enable_streaming: bool = False  # of the dynamic-batch schema
    chat_template: str | None = None
    tool_call_parser: str | None = None  # hermes, json; text: calls stay text; None: a chat with free calls is refused
    reasoning_parser: str | None = None  # think
    is_demo: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine replica. None means that the engine chooses."""

    handler: str = "lmi-dist"
    num_engines: int = 1
    device_ids: tuple[str, ...] = ()  # GPUs of all replicas in turn, as CUDA_VISIBLE_DEVICES names them; () on a CPU
    dtype: str = "auto"  # auto, fp32, bf16, fp16
    quantize: str | None = None  # int8 on lmi-dist
    device: str = "auto"  # auto, cpu, cuda
    max_num_sequences: int | None = None  # option.max_rolling_batch_size
    max_prefill_tokens: int | None = None  # option.max_rolling_batch_prefill_tokens, prompt tokens a step
    max_kv_cache_tokens: int | None = None
    max_sequence_length: int | None = None  # option.max_model_len
    max_queue_size: int | None = None  # requests an Executor holds before Overloaded; None: the front end bounds it
    batch_invariant: bool = True
    allow_pickle: bool = False
    trust_remote_code: bool = False
    tensor_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1
    num_threads: int | None = None
    step_timeout_s: float = 60.0
    first_step_timeout_s: float = 300.0
    model_loading_timeout_s: float = 1200.0
    retry_threshold: int = 3
    retry_window_s: float = 600.0
    strict: bool = False  # an option that nobody knows stops the start
    environ: dict[str, str] = field(default_factory=dict)  # option.env, of engines and of the model's own code
    options: dict[str, str] = field(default_factory=dict)  # every other option.*, for engines that know more
    option_sources: dict[str, str] = field(default_factory=dict, compare=False)  # of any option.*, for messages


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeConfig:
    """A file of the model's own code. With a `handler` it is the model; else formatters around a model.

    A formatter that is None is the function with djl_python's mark, if the file has one.
    """

    path: str
    handler: str | None = None
    output_formatter: str | None = None
    input_formatter: str | None = None
    has_output_formatter: bool = False
    has_input_formatter: bool = False
    properties: dict[str, str] = field(default_factory=dict)  # what the handler's first call is given


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    server: ServerConfig
    model: ModelConfig
    engine: EngineConfig
    code: CodeConfig | None = None

    @property
    def is_custom(self) -> bool:
        """The model is code of its own, and each engine a process that runs it."""
        return self.code is not None and self.code.handler is not None

    @property
    def num_formatters(self) -> int:
        """Processes that run custom formatters."""
        return 0 if self.code is None or self.is_custom else 1


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of `lmi config`."""

    option: str
    value: str
    source: str
    shadowed: tuple[str, ...] = ()  # "value (source)" of what was given too and does not count


@dataclass(frozen=True, slots=True)
class Resolved:
    """The configuration, where each value comes from, and what its author should hear."""

    config: Config
    settings: tuple[Setting, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def dump(config: Config) -> bytes:
    return msgspec.json.encode(config)


def load(data: bytes) -> Config:
    return msgspec.json.decode(data, type=Config)


def resolve_folder(
    asked: str | None, environ: Mapping[str, str], flags: Mapping[str, str], cwd: Path | None = None
) -> Resolved:
    """What `lmi serve ASKED` would run with. Raises BadConfiguration or ModelUnusable."""
    cwd = cwd or Path.cwd()
    folder = choices.find_folder(asked or _named_folder(environ, flags, cwd), cwd)
    file = folder / "serving.properties" if folder else None
    properties = read(file) if file and file.exists() else Properties()
    return resolve(properties, environ, flags, folder=folder, cwd=cwd)


def resolve(
    properties: Properties,
    environ: Mapping[str, str],
    flags: Mapping[str, str],
    *,
    folder: Path | None = None,
    cwd: Path = Path(),
    machine: Machine | None = None,
) -> Resolved:
    """Settle every option. Raises BadConfiguration with one line for each fault, then ModelUnusable.

    `flags` are texts by key of the command line. `folder` None: there is no folder, the demo is served.
    """
    machine = machine or Machine.here(environ)
    findings = Findings(warnings=list(properties.warnings))
    resolution = _Resolution(pick(_expand(collect(properties, environ, flags), machine), findings), findings)
    resolution.choose_code(folder, cwd)
    resolution.choose_engine(machine)
    resolution.choose_replicas(machine)
    resolution.choose_forms()
    resolution.warn_of_task()
    resolution.fit_body_memory()
    resolution.warn_of_what_one_engine_uses()
    options = resolution.other_options()
    if findings.faults:
        raise BadConfiguration("\n".join(findings.faults + findings.unknown))
    resolution.choose_model(folder, cwd)
    resolution.choose("frontend_workers", min(4, max(1, machine.num_cores // 2)), "half of the cores, 1 to 4")
    return Resolved(resolution.config(options), resolution.settings(), tuple(findings.warnings), tuple(findings.notes))


def _named_folder(environ: Mapping[str, str], flags: Mapping[str, str], cwd: Path) -> str | None:
    """The folder that `load_models` names, if it does. It may be missing where another option names the model."""
    givens = sorted(collect(Properties(), environ, flags), key=lambda given: given.rank)
    texts = [given.text for given in givens if given.key == "load_models"]
    models: tuple[NamedModel, ...] = ()
    with suppress(ValueError):  # its own row reports a bad one
        models = MODELS.parse(texts[0]) if texts else ()
    is_named = any(given.key == "option.model_id" for given in givens)
    if not models or (is_named and not (cwd / local_path(models[0].url)).is_dir()):
        return None
    return models[0].url


def _expand(givens: list[Given], machine: Machine) -> list[Given]:
    """Givens that stand for others: an address is host and port, gpu.minWorkers is minWorkers where a GPU is."""
    expanded = []
    for given in givens:
        layer = given.rank[0]
        prefix, _, rest = given.key.partition(".")
        if prefix in ("gpu", "cpu"):
            if (prefix == "gpu") == bool(machine.gpus):
                expanded.append(replace(given, key=rest, rank=(layer, -1)))
            continue
        expanded.append(given)
        if given.key == "inference_address":
            with suppress(ValueError):  # its own row reports a bad one
                host, port = ADDRESS.parse(given.text)
                expanded.append(replace(given, key="host", text=host, rank=(layer, 1)))
                expanded.append(replace(given, key="port", text=str(port), rank=(layer, 1)))
        if given.key == "load_models":
            with suppress(ValueError):
                engines = [model.engine for model in MODELS.parse(given.text)[:1] if model.engine]
                expanded += [replace(given, key="engine", text=engine, rank=(layer, 1)) for engine in engines]
    return expanded


class _Resolution:
    """Values on their way into a Config: picked from what was given, else chosen, else the field's default."""

    def __init__(self, picked: dict[str, Picked], findings: Findings) -> None:
        self.picked = picked
        self.findings = findings
        self.chosen: dict[str, tuple[Any, str]] = {}  # key of an option -> value, why
        self.has_dynamic_batch = False
        self.code: CodeConfig | None = None
        self.unusable: ModelUnusable | None = None  # the code, told after every fault of an option

    def choose(self, key: str, value: Any, reason: str) -> None:
        """Set what nobody gave."""
        if key not in self.picked:
            self.chosen[key] = value, reason

    def choose_code(self, folder: Path | None, cwd: Path) -> None:
        """Which code of the model's own is run, by what its file holds."""
        entry: str | None = self._given("option.entryPoint", None)
        is_builtin = entry is not None and entry.startswith(user_code.BUILT_IN)
        if is_builtin:
            self._check_built_in(str(entry).removeprefix(user_code.BUILT_IN))
        hides_handler = is_builtin and not user_code.TRIES_HANDLER.fullmatch(str(entry))
        places = choices.code_folders(self._given("option.model_id", None), folder, cwd)
        name = "model.py" if entry is None or is_builtin else entry
        path = next((place / name for place in places if (place / name).is_file()), None)
        if path is None:
            if name == entry:
                self._refuse("option.entryPoint", ENTRY_POINT.allowed)
            self._check_formatter_names(frozenset())
            return
        try:
            outline = user_code.outline(path)
        except ModelUnusable as error:
            self.unusable = error
            return
        handler = wanted = self._given("option.handler", user_code.HANDLER)
        if hides_handler or handler not in outline.names:
            if "option.handler" in self.picked and not is_builtin:
                self._refuse("option.handler", f"a function of {path}")
            handler = None
        named = self._check_formatter_names(outline.names)
        kinds = outline.marks | named.keys()
        if handler is None and not kinds:
            if name == entry:
                self._refuse("option.entryPoint", f"a file with a function {user_code.HANDLER} or a formatter")
            lacks = f"has neither a function {wanted} nor a formatter"
            if wanted in outline.names:
                lacks = f"has no formatter, and option.entryPoint={entry} answers in place of its function {wanted}"
            self.findings.warnings.append(f"{path}: {lacks}, so it is not run")
            return
        self.code = CodeConfig(
            path=str(path.resolve()),
            handler=handler,
            output_formatter=named.get("output_formatter"),
            input_formatter=named.get("input_formatter"),
            has_output_formatter="output_formatter" in kinds,
            has_input_formatter="input_formatter" in kinds,
        )

    def _check_built_in(self, name: str) -> None:
        """Entry points of the reference mean nothing here, but for those that do not generate text on CPUs or GPUs."""
        if "stable" in name:
            self._refuse("option.entryPoint", "an entry point that generates text, images are not made here")
        elif "neuron" in name:
            said = self.picked["option.entryPoint"].given.said
            self.findings.warnings.append(f"{said}: {choices.NEURON}, the model runs on GPUs or a CPU")

    def _check_formatter_names(self, names: frozenset[str]) -> dict[str, str]:
        """The functions that options name as formatters, each of which must be among `names`."""
        named = {}
        for kind in user_code.MARKS:
            wanted = self._given(f"option.{kind}", None)
            if wanted is None or wanted in FORMATTER_WORDS:
                continue
            named[kind] = wanted
            if wanted not in names:
                words = f"{', '.join(FORMATTER_WORDS)} or " if kind == "output_formatter" else ""
                self._refuse(f"option.{kind}", f"{words}a function of the model's own model.py")
        return named

    def choose_engine(self, machine: Machine) -> None:
        if self.code is not None and self.code.handler is not None:
            self._settle("option.rolling_batch", choices.CUSTOM, f"{self.code.path} has a function {self.code.handler}")
            return
        asked = self._given("option.rolling_batch", "auto")
        if asked.lower() == choices.NO_ROLLING_BATCH and (reason := self._asynchronous()):
            self.findings.notes.append(f"option.rolling_batch={asked} means auto beside {reason}")
            asked = "auto"
        try:
            handler, reason = choices.choose_handler(asked, machine)
        except BadConfiguration as error:
            self._refuse("option.rolling_batch", str(error))
            return
        self.has_dynamic_batch = asked.lower() == choices.NO_ROLLING_BATCH
        degree = self._degree_of_several(machine)
        if handler == choices.EMBEDDED and degree and choices.VLLM in choices.installed_handlers():
            handler, reason = choices.VLLM, f"{degree} needs several devices"
            self.findings.warnings.append(f"{degree}: {choices.EMBEDDED} runs on one device, so the engine is vllm")
        elif asked != handler:
            self.findings.notes.append(f"option.rolling_batch={asked}: the engine is {handler}, because {reason}")
        self._settle("option.rolling_batch", handler, reason)
        if handler == choices.EMBEDDED and self._given("option.quantize", "int8") != "int8":
            self._refuse("option.quantize", f"int8 on {handler}, more with option.rolling_batch=vllm")
        if handler == choices.EMBEDDED:
            self.choose("option.max_rolling_batch_size", MAX_NUM_SEQUENCES, f"default of {handler}")
            self.choose("option.max_rolling_batch_prefill_tokens", MAX_PREFILL_TOKENS, f"default of {handler}")
        self.choose_dynamic_batch()

    def _degree_of_several(self, machine: Machine) -> str:
        """The parallel degree over 1 that was given, as it was written; or nothing."""
        num_gpus = 0 if self._given("option.device", "auto") == "cpu" else len(machine.gpus)
        for key in ("option.tensor_parallel_degree", "option.pipeline_parallel_degree"):
            degree = self._given(key, 1)
            if (num_gpus if degree == "max" else degree) > 1:
                return self.picked[key].given.said
        return ""

    def _asynchronous(self) -> str:
        """What says that `disable` leaves the batching to the engine, as LMI's asynchronous mode does; or nothing."""
        entry = self._given("option.entryPoint", "")
        if entry.endswith("async_service"):
            return f"option.entryPoint={entry}"
        return "option.async_mode=true" if self._given("option.async_mode", False) else ""

    def choose_dynamic_batch(self) -> None:
        """`batch_size` bounds the running sequences, and nothing waits to be put together."""
        if self.has_dynamic_batch and "batch_size" in self.picked:
            self.choose("option.max_rolling_batch_size", self.picked["batch_size"].value, "batch_size")
        alone = "has an effect with option.rolling_batch=disable alone"
        reasons = {} if self.has_dynamic_batch else {"batch_size": alone, "option.enable_streaming": alone}
        reasons["max_batch_delay"] = "unneeded, a request joins the running batch at once"
        for key, reason in reasons.items():
            if key in self.picked:
                given = self.picked[key].given
                self.findings.notes.append(f"{given.written} ({given.source}): {reason}")

    def choose_replicas(self, machine: Machine) -> None:
        gpus = self._gpus(machine)
        pipeline: int = self._given("option.pipeline_parallel_degree", 1)
        tensor = self._given("option.tensor_parallel_degree", 1)
        handler = self._final("option.rolling_batch")
        is_embedded = handler == choices.EMBEDDED
        if tensor == "max":
            tensor = 1 if is_embedded else max(1, len(gpus) // pipeline)
            self._settle("option.tensor_parallel_degree", tensor, f"max of {len(gpus)} GPUs")
        for key, degree in (("tensor", tensor), ("pipeline", pipeline)):
            if is_embedded and degree > 1:
                self._refuse(f"option.{key}_parallel_degree", ONE_DEVICE)
                return
        if handler == choices.VLLM and not gpus and pipeline > 1:  # its engine would die of the first request
            self._refuse("option.pipeline_parallel_degree", "1 on vllm where no GPU is used")
            return
        low, high = self._given("minWorkers", None), self._given("maxWorkers", None)
        try:
            gpus_each = choices.num_ranks_here(tensor * pipeline, self._given("option.nnodes", ""))
            num_engines = choices.num_engines(len(gpus), gpus_each, low, high)
        except BadConfiguration as error:
            sources = [self.picked[key].given.source for key in ("minWorkers", "maxWorkers") if key in self.picked]
            self.findings.faults.append(f"{error} ({', '.join(sources)})" if sources else str(error))
            return
        self.num_engines, self.device_ids = num_engines, gpus[: num_engines * gpus_each]

    def fit_body_memory(self) -> None:
        """One body of the allowed size always passes."""
        key, largest = "max_body_memory", self._final("max_request_size")
        if self._final(key) >= largest:
            return
        if key in self.picked:
            given = self.picked[key].given
            self.findings.warnings.append(f"{given.said}: less than max_request_size, so {largest} bytes count")
        self._settle(key, largest, "max_request_size")

    def choose_forms(self) -> None:
        """Calls and thoughts of a form that is not read here stay in the text."""
        for key, known, instead in (
            ("option.tool_call_parser", TOOL_CALL_FORMS, "text"),
            ("option.reasoning_parser", REASONING_FORMS, None),
        ):
            name = self._given(key, None)
            if name is not None and name not in known:
                read_here = ", ".join(one for one in known if one != instead)
                said = f"{self.picked[key].given.said}: this form stays plain text, read here are {read_here}"
                self.findings.warnings.append(said)
                self._settle(key, instead, "not read here")

    def choose_model(self, folder: Path | None, cwd: Path) -> None:
        if self.unusable is not None:
            raise self.unusable
        is_custom = self.code is not None and self.code.handler is not None
        find = choices.find_custom_model if is_custom else choices.find_model
        try:
            path, name = find(self._given("option.model_id", None), folder, cwd)
        except ModelUnusable as error:
            source = (
                self._setting("option.model_id").source if "option.model_id" in self.picked else "no option.model_id"
            )
            raise ModelUnusable(f"{error} ({source})") from None
        self.model_path = path.resolve()
        self.is_model_apart = path != folder  # a local folder that option.model_id names
        self._warn_of_other_models(folder)
        self.choose("option.model_id", str(self.model_path), "the folder" if folder else "the built-in demo")
        self.choose_names(self._loaded_name(folder, cwd), name)

    def choose_names(self, loaded: str, name: str) -> None:
        """One of a model's names stands in answers, and it has the others too; `name` is for where nobody gave one."""
        served = self._given("option.served_model_name", ())
        given = {**dict.fromkeys(served, "option.served_model_name"), **({loaded: "load_models"} if loaded else {})}
        first, reason = next(iter(given.items()), (name, "the model's last name"))
        self.choose("option.model_name", first, reason)
        aliases = self._given("option.model_alias", ())
        others = [one for one in (*aliases, *given) if one != self._final("option.model_name")]
        if tuple(others) != aliases:
            self._settle("option.model_alias", tuple(dict.fromkeys(others)), "further names that were given")

    def _loaded_name(self, folder: Path | None, cwd: Path) -> str:
        """The name that `load_models` gives to the model in `folder`; what is not served of it is told."""
        models: tuple[NamedModel, ...] = self._given("load_models", ())
        if not models:
            return ""
        given = self.picked["load_models"].given
        for model in models[1:]:
            self.findings.warnings.append(
                f"{given.written} ({given.source}): one model is served, so {shorten(str(model), 300)} is not"
            )
        place = cwd / local_path(models[0].url)
        if place.is_dir() and choices.find_folder(str(place), cwd) != folder:
            self.findings.warnings.append(
                f"{given.written} ({given.source}): the model in {folder or self.model_path} is served and this is not"
            )
            return ""
        return models[0].name

    def _warn_of_other_models(self, folder: Path | None) -> None:
        """Two that were named, of which one is served without a word, are seldom meant."""
        if (picked := self.picked.get("option.model_id")) is None:
            return
        if folder is not None and folder.resolve() != self.model_path and (folder / "config.json").is_file():
            self.findings.warnings.append(
                f"{picked.given.written} ({picked.given.source}): it is served and the model in {folder} is not"
            )
        for given in [given for given in picked.shadowed if given.text != picked.given.text]:
            self.findings.warnings.append(f"{given.said}: has no effect beside {picked.given.source}")

    def warn_of_task(self) -> None:
        task, handler = self._given("option.task", "auto"), self._final("option.rolling_batch")
        if task.lower() not in GENERATION_TASKS and handler != choices.CUSTOM:
            said = self.picked["option.task"].given.said
            self.findings.warnings.append(f"{said}: only text generation is served, so {handler} generates text")

    def warn_of_what_one_engine_uses(self) -> None:
        for key, (handler, instead) in OF_ONE_ENGINE.items():
            if self._given(key, _default(key)) != _default(key) and self._final("option.rolling_batch") != handler:
                given = self.picked[key].given
                self.findings.warnings.append(
                    f"{given.written} ({given.source}): has an effect on {handler} alone, {instead}"
                )

    def other_options(self) -> dict[str, str]:
        """What engines may know more about; everything that nobody knows is told."""
        handler, options = self._final("option.rolling_batch"), self._options_for_engine()
        of_engine = self._keys_of_engine(handler)
        for picked in [picked for key, picked in self.picked.items() if find(key) is None]:
            key = picked.given.key
            is_option, is_used = key.startswith("option."), of_engine is None or key in of_engine
            self._tell_of_other(picked.given, handler, of_engine)
            if is_option and is_used and key not in WITHOUT_EFFECT:
                options[key.removeprefix("option.")] = picked.value
        return options

    def _options_for_engine(self) -> dict[str, str]:
        """Those rows of the table that engines read themselves."""
        options = {}
        for key, picked in self.picked.items():
            option = find(key)
            if option is not None and option.is_for_engine:
                options[key.removeprefix("option.")] = picked.given.text
        is_auto = "option.max_model_len" in self.picked and self.picked["option.max_model_len"].value is None
        if is_auto and self._final("option.rolling_batch") == choices.VLLM:
            options["max_model_len"] = "auto"  # what its cache can hold; its default is what the model allows
        return options

    def _keys_of_engine(self, handler: str) -> frozenset[str] | None:
        """Every further key that the engine uses; None where that is not known, so it gets all."""
        names = choices.vllm_arguments() if handler == choices.VLLM else frozenset()
        return frozenset(f"option.{name}" for name in names) | TRANSLATED_FOR_VLLM if names else None

    def _tell_of_other(self, given: Given, handler: str, of_engine: frozenset[str] | None) -> None:
        said, meaning = f"{given.written} ({given.source})", elsewhere(given.key)
        is_strict = self._given("option.strict", False)
        if handler == choices.CUSTOM and given.key.startswith("option."):
            return  # the code is given every option
        if given.key in WITHOUT_EFFECT:
            reason = f": {REASONS[given.key]}" if given.key in REASONS else ""
            self.findings.notes.append(f"{said}: has no effect here{reason}")
        elif given.key in (of_engine or ()):
            return
        elif given.key in ENGINE_KEYS and (handler == choices.EMBEDDED or of_engine is not None):
            is_lora = handler == choices.EMBEDDED and given.key in LORA_KEYS
            instead = ", option.rolling_batch=vllm does" if is_lora else ""
            self.findings.warnings.append(f"{said}: {handler} does not use it{instead}")
        elif given.key in ENGINE_KEYS:
            return
        elif is_strict and given.key.startswith("option."):
            hint = f"; {meaning}" if meaning else closest(given.key, of_engine or ())
            self.findings.faults.append(f"{said}: unknown option, and option.strict is true{hint}")
        elif meaning:
            self.findings.warnings.append(f"{said}: {meaning}")
        else:
            unknown = f"{said}: unknown option{closest(given.key, of_engine or ())}"
            self.findings.warnings.append(unknown)
            if closest(given.key):  # else it may be of an engine whose name is a fault
                self.findings.unknown.append(unknown)

    def config(self, options: dict[str, str]) -> Config:
        values: dict[str, dict[str, Any]] = {"server": {}, "model": {}, "engine": {}}
        for option in OPTIONS:
            if option.field and (option.key in self.picked or option.key in self.chosen):
                part, _, name = option.field.partition(".")
                values[part][name] = self._final(option.key)
        if values["model"].get("output_formatter") not in FORMATTER_WORDS:
            values["model"].pop("output_formatter", None)
        return Config(
            server=ServerConfig(**values["server"]),
            model=ModelConfig(
                path=str(self.model_path),
                is_demo=self.model_path == choices.demo_folder(),
                dynamic_batch=self.has_dynamic_batch,
                **values["model"],
            ),
            engine=EngineConfig(
                num_engines=self.num_engines,
                device_ids=self.device_ids,
                options=options,
                option_sources=self._option_sources(),
                **values["engine"],
            ),
            code=self.code and replace(self.code, properties=self._code_properties()),
        )

    def _code_properties(self) -> dict[str, str]:
        """What a handler's first call is given: every option but secrets, as written, and where the model lies."""
        given = [picked.given for picked in self.picked.values() if picked.given.key.startswith("option.")]
        options = {row.key.removeprefix("option."): row.text for row in given if row.shown != "***"}
        options.setdefault("tensor_parallel_degree", str(self._final("option.tensor_parallel_degree")))
        if self.is_model_apart or "model_id" not in options:
            options["model_id"] = str(self.model_path)
        return options | {"model_dir": str(self.model_path), "device_id": "0" if self.device_ids else "-1"}

    def _option_sources(self) -> dict[str, str]:
        """Where each option.* was given."""
        options = [(key, picked) for key, picked in self.picked.items() if key.startswith("option.")]
        return {key.removeprefix("option."): picked.given.source for key, picked in options}

    def settings(self) -> tuple[Setting, ...]:
        """Every option of the table in its order, then the others that were given."""
        known = [option.key for option in OPTIONS]
        rows = [self._setting(key) for key in [*known, *sorted(set(self.picked) - set(known))]]
        for row in rows:
            for loser in row.shadowed:
                self.findings.notes.append(f"{row.option}: {row.value} ({row.source}) counts, not {loser}")
        return tuple(rows)

    def _setting(self, key: str) -> Setting:
        value = _text(self._final(key)) or UNSET.get(key, "")
        picked = self.picked.get(key)
        if picked is None:
            return Setting(key, value, self.chosen[key][1] if key in self.chosen else "default")
        reason = f", {self.chosen[key][1]}" if key in self.chosen else ""
        shadowed = tuple(f"{given.shown} ({given.source})" for given in picked.shadowed)
        is_secret = picked.given.shown == "***"
        return Setting(key, "***" if is_secret else value, picked.given.source + reason, shadowed)

    def _gpus(self, machine: Machine) -> tuple[str, ...]:
        device, wanted = self._given("option.device", "auto"), self._given("load_on_devices", None)
        if device == "cuda" and not machine.gpus:
            self._refuse("option.device", "auto or cpu, since no GPU is visible")
        gpus = () if device == "cpu" else machine.gpus
        if wanted is None:
            return gpus
        if any(int(number) >= len(gpus) for number in wanted):
            self._refuse("load_on_devices", f"* or numbers below {len(gpus)}" if gpus else "*, since no GPU is used")
            return gpus
        return tuple(gpus[int(number)] for number in wanted)

    def _given(self, key: str, otherwise: Any) -> Any:
        return self.picked[key].value if key in self.picked else otherwise

    def _final(self, key: str) -> Any:
        if key in self.chosen:
            return self.chosen[key][0]
        return self.picked[key].value if key in self.picked else _default(key)

    def _settle(self, key: str, value: Any, reason: str) -> None:
        """Set what a given word such as auto or max comes to."""
        if self._given(key, None) != value:
            self.chosen[key] = value, reason

    def _refuse(self, key: str, allowed: str) -> None:
        self.findings.faults.append(fault(self.picked[key].given, allowed))


# What it means to set nothing, where no field of a Config has a value that says it.
UNSET = {"load_on_devices": "*", "predict_timeout": "none", "option.request_stats_max_iterations": "0"}
DEFAULTS = {"server": ServerConfig(), "model": ModelConfig(path="", name=""), "engine": EngineConfig()}


def _default(key: str) -> Any:
    option = find(key)
    if option is None or not option.field:
        return None
    part, _, name = option.field.partition(".")
    return getattr(DEFAULTS[part], name)


def _text(value: Any) -> str:
    """A value as serving.properties would have it."""
    if value is None or value in ("", {}):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return ";".join(map(str, value)) if isinstance(value, tuple) else str(value)
