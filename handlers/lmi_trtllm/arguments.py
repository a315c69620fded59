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

from handlers.base.configuration import pickled_files, refusal
from handlers.driven.arguments import DTYPES, OPTION_OF, first_line, named, tell_unknown
from handlers.lmi_trtllm import about, options
from lmi.adapters.files import is_enabled
from lmi.errors import BadConfiguration, ModelUnusable, shorten
from lmi.settings.config import EngineConfig

# These differ from TensorRT-LLM's defaults: without a backend it answers guided requests unguided,
# or not at all.
DEFAULTS: dict[str, Any] = {"guided_decoding_backend": "xgrammar"}
LEFT_TO_LLM = frozenset(
    {"cuda_graph_config"}
)  # on main, LLM chooses between two classes by what the object holds
ENGINE_FOLDER = (
    "a built engine of TensorRT: tensorrt_llm.LLM reads none in 1.2, and later versions have "
    "removed them; name the "
    "folder of the checkpoint that the engine was built from, as Hugging Face has it"
)
CONVERTED_FOLDER = (
    "a checkpoint that was converted for TensorRT's engines: name the folder that it was converted "
    "from, as Hugging "
    "Face has it"
)
WORD = "decoding_type"
QUEUE_POLICY = "waiting_queue_policy"
ARGUMENTS = {f"option.{OPTION_OF[field]}": argument for field, argument in options.OURS.items()}

log = logging.getLogger("lmi.trtllm")


@dataclass(frozen=True, slots=True)
class Said:
    """A value for an argument of LLM, or for a field of a nested one, and the option
    that gave it.
    """

    option: str
    target: str
    value: Any


def llm_arguments(config: EngineConfig, model_path: str, profile: about.Profile) -> dict[str, Any]:
    """The keyword arguments of `tensorrt_llm.LLM`, all of the types of its fields. Warnings go to
    the log.

    Raises BadConfiguration with one line for each fault, ModelUnusable for a folder that LLM cannot
    read, SecurityRefused for weights that would be unpickled.
    """
    if refused := about.check(config):
        lines = [
            f"{named(config, key.removeprefix('option.'))}: allowed is {why}"
            for key, why in refused.items()
        ]
        raise BadConfiguration("\n".join(lines))

    _check_folder(Path(model_path), config)
    faults: list[str] = []
    ours = [
        Said(OPTION_OF[field], argument, getattr(config, field))
        for field, argument in options.OURS.items()
    ]
    said = [
        *(each for each in ours if each.value is not None),
        *_others(config, profile.name, faults),
    ]
    given = _by_argument(said, config, faults)
    # Cached tokens of a part of a block would tell a client, one by one, what others have asked.
    _fill_in(given, "kv_cache_config", "enable_partial_reuse", False)
    if (
        profile.takes_priority
        and QUEUE_POLICY in TorchLlmArgs.model_fields["scheduler_config"].annotation.model_fields
    ):
        _fill_in(
            given, "scheduler_config", QUEUE_POLICY, "priority"
        )  # the queue by default ignores a priority

    typed = {
        name: _typed(name, values, config, profile.name, faults) for name, values in given.items()
    }
    if faults:
        raise BadConfiguration("\n".join(faults))

    max_prompt = typed.get("max_input_len")
    max_length = typed.get("max_seq_len")
    if max_prompt is not None and max_length is not None and max_prompt >= max_length:
        log.warning(
            "%s: a prompt has at most %d tokens, because prompt and answer together have at most "
            "%d "
            "(option.max_model_len, which option.max_output_len sets too)",
            *(named(config, "max_input_len"), max_length - 1, max_length),
        )

    defaults = {} if typed.get("skip_tokenizer_init") else DEFAULTS  # guides need the tokenizer
    if (
        config.max_beam_width or 1
    ) > 1:  # a search may answer once, at its end; its iterations show that it goes on
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

    if (
        not any(folder.glob("*.safetensors"))
        and not config.allow_pickle
        and (files := pickled_files(folder))
    ):
        raise refusal(files[0])


def _check_quantisation(folder: Path, stored: Mapping[str, Any], config: EngineConfig) -> None:
    """The method that option.quantize names must be the one that the checkpoint has."""
    optimised = _json(folder / "hf_quant_config.json").get("quantization") or {}
    methods = [
        optimised.get("quant_algo"),
        (stored.get("quantization_config") or {}).get("quant_method"),
    ]
    has = next((str(method) for method in methods if method), None)
    method = str(config.quantize)
    if has is None:
        raise BadConfiguration(
            f"{named(config, 'quantize', method)}: allowed is {options.QUANTISE_BEFORE}"
        )

    if method.lower() not in has.lower():
        raise BadConfiguration(
            f"{named(config, 'quantize', method)}: allowed is {has}, as the checkpoint has it"
        )


def _json(file: Path) -> dict[str, Any]:
    """The object in a file, or an empty one, because LLM reports a fault of the file better."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}

    return content if isinstance(content, dict) else {}


def _others(config: EngineConfig, version: str, faults: list[str]) -> list[Said]:
    """What the options say that have no field of their own in an EngineConfig."""
    said = []
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
            known = (
                *TorchLlmArgs.model_fields,
                *options.TRANSLATED,
                *options.FORBIDDEN,
                *options.IGNORED,
            )
            tell_unknown(config, text, name, known, faults)
        elif (
            isinstance(value, dict) and value and "." not in target
        ):  # a field at a time, so that none is set twice
            said += [Said(name, f"{target}.{field}", each) for field, each in value.items()]
        elif value is not options.UPSTREAMS:
            said.append(Said(name, target, value))

    return _with_lora(said, config)


def _with_lora(said: list[Said], config: EngineConfig) -> list[Said]:
    """LLM takes adapters just where there is a lora_config, which its defaults make, whatever
    enable_lora says.
    """
    own = [each for each in said if each.target.startswith("lora_config")]
    if is_enabled(config.options):
        return said if own else [*said, Said("enable_lora", "lora_config", {})]

    for option in sorted({each.option for each in own}):
        log.warning("%s: has no effect without option.enable_lora=true", named(config, option))

    return [each for each in said if each not in own]


def _by_argument(
    said: list[Said], config: EngineConfig, faults: list[str]
) -> dict[str, dict[str, Said]]:
    """Each argument with its fields; the field "" is the whole argument. Two options for one of
    them must agree.
    """
    given: dict[str, dict[str, Said]] = {}
    for each in said:
        argument, _, field = each.target.partition(".")
        fields = given.setdefault(argument, {})
        rivals = (
            other for place, other in fields.items() if place == field or "" in (place, field)
        )
        if rival := next(
            (other for other in rivals if str(other.value).lower() != str(each.value).lower()), None
        ):
            both = " and ".join(named(config, option) for option in (rival.option, each.option))
            faults.append(
                f"{both}: these set the same argument, {each.target}, allowed is one of them"
            )
        else:
            fields[field] = each

    return given


def _fill_in(given: dict[str, dict[str, Said]], argument: str, field: str, value: object) -> None:
    """Set a field of a nested configuration, unless an option sets it or the whole
    configuration.
    """
    fields = given.setdefault(argument, {})
    if "" not in fields:
        fields.setdefault(field, Said(argument, f"{argument}.{field}", value))


def _typed(
    name: str, values: Mapping[str, Said], config: EngineConfig, version: str, faults: list[str]
) -> Any:
    """The value of one argument as its field's type. Adds a line to `faults` for each fault."""
    value = (
        values[""].value if "" in values else {field: said.value for field, said in values.items()}
    )
    first = next(iter(values.values())).option
    try:
        return _read(name, value)
    except ValidationError as error:
        for fault in error.errors():
            place = [str(part) for part in fault["loc"]]
            said = values.get(place[0] if place else "", values.get(""))
            faults.append(
                f"{named(config, said.option if said else first)}: "
                f"{_reason(name, place, fault, version)}"
            )
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
        kinds = [field.annotation, *get_args(field.annotation)]
        if kind := next((one for one in kinds if getattr(one, WORD, None) == value[WORD]), None):
            return kind(**{key: each for key, each in value.items() if key != WORD})

    hint: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    is_model = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    settings = None if is_model else ConfigDict(arbitrary_types_allowed=True)
    return TypeAdapter(hint, config=settings).validate_python(value)


def _reason(name: str, place: list[str], fault: Mapping[str, Any], version: str) -> str:
    target = ".".join([name, *place[:1]])
    if fault["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        why = f", {options.LACKING[target]}" if target in options.LACKING else ""
        return f"TensorRT-LLM ({version}) has no {target}{why}"

    said = first_line(str(fault["msg"]).removeprefix("Value error, "))
    return f"{'.'.join([name, *place])}: {said}"
