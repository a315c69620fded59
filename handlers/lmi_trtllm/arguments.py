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
# The key that says which class of a union an object is.
WORD = "decoding_type"
QUEUE_POLICY = "waiting_queue_policy"
# By option of lmi: the argument of LLM that it sets.
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
    """Return the keyword arguments of `tensorrt_llm.LLM`, all of the types of its fields. Warnings
    go to the log.

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

    _warn_of_lengths(typed, config)
    # Guides need the tokenizer.
    defaults = {} if typed.get("skip_tokenizer_init") else DEFAULTS
    # A search may answer once, at its end. Its iterations show that it goes on.
    if (config.max_beam_width or 1) > 1:
        defaults = {**defaults, "enable_iter_perf_stats": True}

    return {**defaults, **typed, "dtype": DTYPES[config.dtype], "model": model_path}


def _warn_of_lengths(typed: Mapping[str, Any], config: EngineConfig) -> None:
    """Log that a prompt may not be as long as an option says, if that is so."""
    max_prompt = typed.get("max_input_len")
    max_length = typed.get("max_seq_len")
    if max_prompt is None or max_length is None or max_prompt < max_length:
        return

    log.warning(
        "%s: a prompt has at most %d tokens, because prompt and answer together have at most "
        "%d (option.max_model_len, which option.max_output_len sets too)",
        named(config, "max_input_len"),
        max_length - 1,
        max_length,
    )


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
    """Raise BadConfiguration unless option.quantize names the method that the checkpoint has."""
    of_optimizer = _json(folder / "hf_quant_config.json").get("quantization") or {}
    of_config = stored.get("quantization_config") or {}
    stored_method = of_optimizer.get("quant_algo") or of_config.get("quant_method")

    method = str(config.quantize)
    option = named(config, "quantize", method)
    if not stored_method:
        raise BadConfiguration(f"{option}: allowed is {options.QUANTISE_BEFORE}")

    if method.lower() not in str(stored_method).lower():
        raise BadConfiguration(f"{option}: allowed is {stored_method}, as the checkpoint has it")


def _json(file: Path) -> dict[str, Any]:
    """Return the object in a file, or an empty one: LLM reports a fault of the file better."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}

    return content if isinstance(content, dict) else {}


def _from_fields(config: EngineConfig) -> list[ArgumentSetting]:
    """Return what the fields of an EngineConfig say that are arguments too."""
    settings = []
    for field, argument in options.OURS.items():
        value = getattr(config, field)
        if value is not None:
            settings.append(ArgumentSetting(OPTION_OF[field], argument, value))

    return settings


def _from_options(config: EngineConfig, version: str, faults: list[str]) -> list[ArgumentSetting]:
    """Return what the options say that have no field of their own in an EngineConfig.

    Adds a line to `faults` for each fault.
    """
    settings: list[ArgumentSetting] = []
    for name, text in config.options.items():
        if name in options.FORBIDDEN or name in options.IGNORED:
            continue

        target = options.TRANSLATED.get(name, name)
        target = ARGUMENTS.get(target, target)
        reader = options.READ.get(name, options.parsed)
        try:
            value = reader(text)
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
    """Return the settings with a lora_config just where option.enable_lora says so.

    LLM takes adapters where there is one, whatever its own argument enable_lora says.
    """
    of_lora = [setting for setting in settings if setting.target.startswith("lora_config")]
    if not is_enabled(config.options):
        for option in sorted({setting.option for setting in of_lora}):
            log.warning("%s: has no effect without option.enable_lora=true", named(config, option))

        return [setting for setting in settings if setting not in of_lora]

    if of_lora:
        return settings

    # LLM's defaults make the whole of it.
    return [*settings, ArgumentSetting("enable_lora", "lora_config", {})]


def _by_argument(
    settings: list[ArgumentSetting], config: EngineConfig, faults: list[str]
) -> dict[str, dict[str, ArgumentSetting]]:
    """Return the settings by argument and field, where the field "" is the whole argument.

    Two options for the same must agree; else a line is added to `faults`.
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
    """Return one of the `fields` that sets the same as a setting of this field, to another
    value.
    """
    value = str(setting.value).lower()
    for rival_field, rival in fields.items():
        sets_the_same = rival_field == field or "" in (rival_field, field)
        if sets_the_same and str(rival.value).lower() != value:
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
    """Return the value of one argument as its field's type. Adds a line to `faults` for each
    fault.
    """
    whole = fields.get("")
    value: Any
    if whole is not None:
        value = whole.value
    else:
        value = {field: setting.value for field, setting in fields.items()}

    first_setting = next(iter(fields.values()))
    try:
        return _read(name, value)
    except ValidationError as error:
        for fault in error.errors():
            place = [str(part) for part in fault["loc"]]
            faulty_field = place[0] if place else ""
            setting = fields.get(faulty_field, whole) or first_setting
            reason = _reason(name, place, fault, version)
            faults.append(f"{named(config, setting.option)}: {reason}")
    except (TypeError, ValueError) as error:
        text = shorten(str(error), 200)[1:-1]
        faults.append(f"{named(config, first_setting.option)}: {text}")

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
