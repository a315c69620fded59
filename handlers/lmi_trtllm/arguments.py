"""Translates an EngineConfig, whose options name any field of `TorchLlmArgs`, to the typed
arguments of `LLM`.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from tensorrt_llm.llmapi import TorchLlmArgs

from handlers.base.pickles import pickled_files, refusal
from handlers.driven.arguments import DTYPES, OPTION_OF, first_line, named, tell_unknown
from handlers.lmi_trtllm import about, options
from handlers.lmi_trtllm.profile import Profile
from lmi.adapters.files import is_enabled
from lmi.errors import BadConfiguration, ModelUnusable, shorten
from lmi.settings.config import EngineConfig

# These differ from TensorRT-LLM's defaults: without a backend it answers guided requests unguided,
# or not at all.
DEFAULTS: dict[str, Any] = {"guided_decoding_backend": "xgrammar"}
# On main, LLM chooses between two classes by what the object holds.
LEFT_TO_LLM = frozenset({"cuda_graph_config"})
ENGINE_FOLDER = (
    "a built engine of TensorRT: tensorrt_llm.LLM reads none in 1.2, and later versions have "
    "removed them; name the folder of the checkpoint that the engine was built from, as Hugging "
    "Face has it"
)
CONVERTED_FOLDER = (
    "a checkpoint that was converted for TensorRT's engines: name the folder that it was converted "
    "from, as Hugging Face has it"
)
WORD = "decoding_type"
QUEUE_POLICY = "waiting_queue_policy"
ARGUMENTS = {f"option.{OPTION_OF[field]}": argument for field, argument in options.OURS.items()}

log = logging.getLogger("lmi.trtllm")


@dataclass(frozen=True, slots=True)
class ArgumentSetting:
    """A value for an argument of LLM, or for a field of a nested one, and the option that gave it.

    `target` is the name of the argument, with that of the field behind a dot.
    """

    option: str
    target: str
    value: Any


def llm_arguments(config: EngineConfig, model_path: str, profile: Profile) -> dict[str, Any]:
    """The keyword arguments of `tensorrt_llm.LLM`, all of the types of its fields. Warnings go to
    the log.

    Raises BadConfiguration with one line for each fault, ModelUnusable for a folder that LLM cannot
    read, SecurityRefused for weights that would be unpickled.
    """
    refusals = about.check(config)
    if refusals:
        lines = []
        for key, why in refusals.items():
            option = named(config, key.removeprefix("option."))
            lines.append(f"{option}: allowed is {why}")

        raise BadConfiguration("\n".join(lines))

    _check_folder(Path(model_path), config)
    faults: list[str] = []
    settings = [*_from_fields(config), *_from_options(config, profile.name, faults)]
    by_argument = _by_argument(settings, config, faults)

    # Cached tokens of a part of a block would tell a client, one by one, what others have asked.
    _fill_in(by_argument, "kv_cache_config", "enable_partial_reuse", False)

    # The queue by default ignores a priority.
    scheduler_fields = TorchLlmArgs.model_fields["scheduler_config"].annotation.model_fields
    if profile.takes_priority and QUEUE_POLICY in scheduler_fields:
        _fill_in(by_argument, "scheduler_config", QUEUE_POLICY, "priority")

    typed: dict[str, Any] = {}
    for name, fields in by_argument.items():
        typed[name] = _typed(name, fields, config, profile.name, faults)

    if faults:
        raise BadConfiguration("\n".join(faults))

    max_prompt = typed.get("max_input_len")
    max_length = typed.get("max_seq_len")
    if max_prompt is not None and max_length is not None and max_prompt >= max_length:
        log.warning(
            "%s: a prompt has at most %d tokens, because prompt and answer together have at most "
            "%d (option.max_model_len, which option.max_output_len sets too)",
            named(config, "max_input_len"),
            max_length - 1,
            max_length,
        )

    # Guides need the tokenizer.
    defaults = {} if typed.get("skip_tokenizer_init") else DEFAULTS
    # A search may answer once, at its end. Its iterations show that it goes on.
    if (config.max_beam_width or 1) > 1:
        defaults = {**defaults, "enable_iter_perf_stats": True}

    return {**defaults, **typed, "dtype": DTYPES[config.dtype], "model": model_path}


def _check_folder(folder: Path, config: EngineConfig) -> None:
    """Refuse what LLM does not load, or only by running what is in it."""
    if any(folder.glob("**/*.engine")):
        raise ModelUnusable(f"{folder}: {ENGINE_FOLDER}")

    stored = _json(folder / "config.json")
    if "mapping" in stored and isinstance(stored.get("architecture"), str):
        raise ModelUnusable(f"{folder}: {CONVERTED_FOLDER}")

    if config.quantize is not None:
        _check_quantisation(folder, stored, config)

    if config.allow_pickle or any(folder.glob("*.safetensors")):
        return

    pickled = pickled_files(folder)
    if pickled:
        raise refusal(pickled[0])


def _check_quantisation(folder: Path, stored: Mapping[str, Any], config: EngineConfig) -> None:
    """The method that option.quantize names must be the one that the checkpoint has."""
    optimised = _json(folder / "hf_quant_config.json").get("quantization") or {}
    quantised = stored.get("quantization_config") or {}
    stored_method = optimised.get("quant_algo") or quantised.get("quant_method")

    method = str(config.quantize)
    option = named(config, "quantize", method)
    if not stored_method:
        raise BadConfiguration(f"{option}: allowed is {options.QUANTISE_BEFORE}")

    if method.lower() not in str(stored_method).lower():
        raise BadConfiguration(f"{option}: allowed is {stored_method}, as the checkpoint has it")


def _json(file: Path) -> dict[str, Any]:
    """The object in a file, or an empty one, because LLM reports a fault of the file better."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}

    return content if isinstance(content, dict) else {}


def _from_fields(config: EngineConfig) -> list[ArgumentSetting]:
    """What the fields of an EngineConfig say that are arguments too."""
    settings = []
    for field, argument in options.OURS.items():
        value = getattr(config, field)
        if value is not None:
            settings.append(ArgumentSetting(OPTION_OF[field], argument, value))

    return settings


def _from_options(config: EngineConfig, version: str, faults: list[str]) -> list[ArgumentSetting]:
    """What the options say that have no field of their own in an EngineConfig."""
    settings = []
    for name, text in config.options.items():
        if name in options.FORBIDDEN or name in options.IGNORED:
            continue

        target = options.TRANSLATED.get(name, name)
        target = ARGUMENTS.get(target, target)
        try:
            value = options.READ.get(name, options.parsed)(text)
        except ValueError as error:
            faults.append(f"{named(config, name, text)}: allowed is {error}")
            continue

        if target.partition(".")[0] not in TorchLlmArgs.model_fields:
            text = f"{named(config, name)}: TensorRT-LLM ({version}) has no argument {target}"
            names = (
                *TorchLlmArgs.model_fields,
                *options.TRANSLATED,
                *options.FORBIDDEN,
                *options.IGNORED,
            )
            tell_unknown(config, text, name, names, faults)
        # It is set a field at a time, so that none is set twice.
        elif isinstance(value, dict) and value and "." not in target:
            for field, field_value in value.items():
                settings.append(ArgumentSetting(name, f"{target}.{field}", field_value))
        elif value is not options.UPSTREAMS:
            settings.append(ArgumentSetting(name, target, value))

    return _with_lora(settings, config)


def _with_lora(settings: list[ArgumentSetting], config: EngineConfig) -> list[ArgumentSetting]:
    """LLM takes adapters just where there is a lora_config, which its defaults make, whatever
    enable_lora says.
    """
    of_lora = [setting for setting in settings if setting.target.startswith("lora_config")]
    if is_enabled(config.options):
        return (
            settings if of_lora else [*settings, ArgumentSetting("enable_lora", "lora_config", {})]
        )

    for option in sorted({setting.option for setting in of_lora}):
        log.warning("%s: has no effect without option.enable_lora=true", named(config, option))

    return [setting for setting in settings if setting not in of_lora]


def _by_argument(
    settings: list[ArgumentSetting], config: EngineConfig, faults: list[str]
) -> dict[str, dict[str, ArgumentSetting]]:
    """Each argument with its fields; the field "" is the whole argument. Two options for one of
    them must agree.
    """
    by_argument: dict[str, dict[str, ArgumentSetting]] = {}
    for setting in settings:
        argument, _, field = setting.target.partition(".")
        fields = by_argument.setdefault(argument, {})
        rival = _rival_of(setting, field, fields)
        if rival is None:
            fields[field] = setting
        else:
            first = named(config, rival.option)
            second = named(config, setting.option)
            faults.append(
                f"{first} and {second}: these set the same argument, {setting.target}, allowed is "
                f"one of them"
            )

    return by_argument


def _rival_of(
    setting: ArgumentSetting, field: str, fields: Mapping[str, ArgumentSetting]
) -> ArgumentSetting | None:
    """One of the `fields` that sets the same as a setting of this field, to another value."""
    for rival_field, rival in fields.items():
        set_the_same = rival_field == field or "" in (rival_field, field)
        if set_the_same and str(rival.value).lower() != str(setting.value).lower():
            return rival

    return None


def _fill_in(
    by_argument: dict[str, dict[str, ArgumentSetting]], argument: str, field: str, value: object
) -> None:
    """Set a field of a nested configuration, unless an option sets it or the whole
    configuration.
    """
    fields = by_argument.setdefault(argument, {})
    if "" not in fields:
        fields.setdefault(field, ArgumentSetting(argument, f"{argument}.{field}", value))


def _typed(
    name: str,
    fields: Mapping[str, ArgumentSetting],
    config: EngineConfig,
    version: str,
    faults: list[str],
) -> Any:
    """The value of one argument as its field's type. Adds a line to `faults` for each fault."""
    whole = fields.get("")
    if whole is not None:
        value = whole.value
    else:
        value = {field: setting.value for field, setting in fields.items()}

    first = next(iter(fields.values())).option
    try:
        return _read(name, value)
    except ValidationError as error:
        for fault in error.errors():
            place = [str(part) for part in fault["loc"]]
            setting = fields.get(place[0] if place else "", whole)
            option = setting.option if setting else first
            reason = _reason(name, place, fault, version)
            faults.append(f"{named(config, option)}: {reason}")
    except (TypeError, ValueError) as error:
        faults.append(f"{named(config, first)}: {shorten(str(error), 200)[1:-1]}")

    return None


def _read(name: str, value: Any) -> Any:
    """Read a value as a field of TorchLlmArgs does. Raises ValidationError, or what a nested class
    raises.
    """
    if name in LEFT_TO_LLM and isinstance(value, dict):
        return value

    field = TorchLlmArgs.model_fields[name]
    if isinstance(value, dict) and WORD in value:
        # Older classes of a union have their own words outside of their fields, so an object with a
        # word fits none.
        for kind in (field.annotation, *get_args(field.annotation)):
            if getattr(kind, WORD, None) == value[WORD]:
                fields = {key: entry for key, entry in value.items() if key != WORD}
                return kind(**fields)

    hint: Any = field.annotation
    if field.metadata:
        hint = Annotated[field.annotation, *field.metadata]

    is_model = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    settings = None if is_model else ConfigDict(arbitrary_types_allowed=True)
    return TypeAdapter(hint, config=settings).validate_python(value)


def _reason(name: str, place: list[str], fault: Mapping[str, Any], version: str) -> str:
    target = ".".join([name, *place[:1]])
    if fault["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        why = f", {options.LACKING[target]}" if target in options.LACKING else ""
        return f"TensorRT-LLM ({version}) has no {target}{why}"

    reason = first_line(str(fault["msg"]).removeprefix("Value error, "))
    return f"{'.'.join([name, *place])}: {reason}"
