"""What is known of TensorRT-LLM without importing it: its Handler record, its versions, and why it
does not start.

All of this package was written from the published sources of main of October 2025 and of August
2026, pages of 1.3.0rc24 and rc26, and pull requests between them; none is of a release.
"""

import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version

from handlers.driven.arguments import fields_by_class, first_line, named, refusal
from handlers.lmi_trtllm.options import (
    CONFIG_CLASSES,
    FORBIDDEN,
    IGNORED,
    LACKING,
    QUANTISE_BEFORE,
    TRANSLATED,
)
from lmi.errors import ModelUnusable, NoMemory, StartError
from lmi.settings.config import EngineConfig, SamplingDefaults, SamplingValues
from lmi.settings.handler import Handler, folder_of

CHECKED = (
    "checked against the published sources of TensorRT-LLM's main of October 2025 and of August "
    "2026, never run on the wheel"
)
NOTHING_IS_SENT = {"TRTLLM_NO_USAGE_STATS": "1", "TELEMETRY_DISABLED": "1", "DO_NOT_TRACK": "1"}
# The file that declares what LLM takes.
ARGUMENTS = ("tensorrt_llm", "llmapi", "llm_args.py")
ARGUMENT_CLASSES = ("BaseLlmArgs", "TorchLlmArgs")
# Ranks on one machine need no network: TensorRT-LLM's answer to a single node that hangs. A
# container rarely may read another process's memory (CMA), which shared memory of Open MPI 4 would
# use for large messages.
OF_MPI = {
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "OMPI_MCA_oob_tcp_if_include": "lo",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
}
# The reference's own defaults for this engine, and a beam width that costs nothing.
DEFAULTS = {
    "option.max_beam_width": 1,
    "option.max_rolling_batch_size": 256,
    "option.max_rolling_batch_prefill_tokens": 16384,
}
# LMI's page of parameters has them in its list for TensorRT-LLM.
SAMPLING = SamplingDefaults(
    with_do_sample=SamplingValues(temperature=1.0, top_k=5, top_p=0.85),
    without=SamplingValues(temperature=0.8, top_k=0, top_p=0.0),
)
OWN_SPECULATION = (
    "nothing on trtllm, whose own option is option.speculative_config, as in "
    '{"decoding_type": "NGram", "max_draft_len": 4, "max_matching_ngram_size": 2}'
)
# A value of the argument sampler_type, and its default.
CPP_SAMPLER = "TRTLLMSampler"
AUTO = "auto"
NUMBERS = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?:rc(\d+))?")
OUT_OF_MEMORY = (
    "set option.kv_cache_free_gpu_mem_fraction, option.max_rolling_batch_prefill_tokens, "
    "option.max_model_len or option.max_rolling_batch_size lower, or "
    "option.tensor_parallel_degree higher"
)
FROM_THE_IMAGE = "serve from the image of target trtllm"
# What the most telling error in a chain says, in the order in which they are looked for, and what
# helps.
ADVICE = {
    r"Unknown architecture for|architecture \S+ is not supported": (
        "its PyTorch engine has no such model: take option.rolling_batch=vllm, or a newer "
        "TensorRT-LLM"
    ),
    r"Only \d+ GPUs are available": (
        "set option.tensor_parallel_degree or option.pipeline_parallel_degree lower, or make more "
        "GPUs visible"
    ),
    "insufficient GPU memory|out of memory|OutOfMemory": OUT_OF_MEMORY,
    "no CUDA-capable device|No CUDA GPUs are available|Found no NVIDIA driver|not compiled with "
    "CUDA": (
        "TensorRT-LLM runs on an NVIDIA GPU: give the container one (docker run --gpus all), or "
        "take another engine"
    ),
    "libmpi|mpi4py|MPI_Init|orted|prte": (
        f"install Open MPI (apt-get install libopenmpi-dev openmpi-bin), or {FROM_THE_IMAGE}"
    ),
    r"named 'tensorrt_llm(\.llmapi)?'|cannot import name 'LLM'": (
        f"the package is not whole: its wheel on PyPI is a stub that fetches the real one; "
        f"{FROM_THE_IMAGE}"
    ),
    r"cannot import name .*tensorrt_llm|named 'tensorrt_llm\.": (
        f"this TensorRT-LLM has it elsewhere or no longer: {FROM_THE_IMAGE}"
    ),
    "cannot open shared object|undefined symbol": (
        f"TensorRT-LLM needs its own CUDA libraries: {FROM_THE_IMAGE}"
    ),
}


def option_names() -> frozenset[str] | None:
    """The arguments of the installed LLM and the options of its table, or None if TensorRT-LLM is
    not installed.
    """
    classes = fields_by_class(*ARGUMENTS)
    arguments: set[str] = set()
    for name in ARGUMENT_CLASSES:
        arguments.update(classes.get(name, ()))

    arguments.discard("model_config")
    if not arguments:
        return None

    return frozenset(arguments | TRANSLATED.keys() | FORBIDDEN.keys()) - IGNORED.keys()


def check(config: EngineConfig) -> Mapping[str, str]:
    """Refuse what this engine cannot do, and what the installed line lacks, with the reason."""
    faults = _lacking(config)
    for name in config.options.keys() & FORBIDDEN.keys():
        harmless = FORBIDDEN[name].partition(":")[0]
        if harmless == "nothing" or config.options[name].lower() != harmless:
            faults[f"option.{name}"] = FORBIDDEN[name]

    if config.device == "cpu":
        faults["option.device"] = "auto or cuda on trtllm"

    if config.speculative is not None:
        faults["option.speculative"] = OWN_SPECULATION

    if (config.quantize or "").lower() == "smoothquant":
        faults["option.quantize"] = QUANTISE_BEFORE

    return faults


def _lacking(config: EngineConfig) -> dict[str, str]:
    """Each option whose argument the installed TensorRT-LLM lacks, as far as its source
    text says.
    """
    classes = fields_by_class(*ARGUMENTS)
    faults = dict[str, str]()
    for name in sorted(config.options.keys() & (TRANSLATED.keys() | LACKING.keys())):
        target = TRANSLATED.get(name, name)
        argument, _, field = target.partition(".")
        if field:
            class_name = CONFIG_CLASSES.get(argument, "")
        else:
            class_name = ARGUMENT_CLASSES[-1]

        # What the text does not show counts as existing.
        fields = classes.get(class_name)
        if fields is not None and (field or argument) not in fields:
            why = f", {LACKING[target]}" if target in LACKING else ""
            faults[f"option.{name}"] = f"nothing: this TensorRT-LLM has no {target}{why}"

    return faults


def environment(
    config: EngineConfig, environ: Mapping[str, str], slot: int, folder: str
) -> Mapping[str, str]:
    """Forbid reports, give ranks their GPUs, take packages from where TensorRT-LLM is. Else the
    operator's environment counts.
    """
    variables: dict[str, str] = {}
    for name, value in (NOTHING_IS_SENT | OF_MPI).items():
        if name not in environ:
            variables[name] = value

    num_gpus = len(config.device_ids) // config.num_engines
    gpus = config.device_ids[slot * num_gpus : (slot + 1) * num_gpus]
    if gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)

    return {**variables, **base_packages(environ)}


def base_packages(environ: Mapping[str, str], prefix: str = sys.prefix) -> Mapping[str, str]:
    """The variable with which processes take packages first from where TensorRT-LLM is, unless that
    is below `prefix`, where ours are.

    lmi's environment lies on top of that one, as in the image, and has newer versions of some
    packages there: its huggingface_hub ends the import of the transformers that TensorRT-LLM 1.2
    pins.
    """
    library = folder_of("tensorrt_llm")
    if library is None or library.is_relative_to(prefix):
        return {}

    packages = str(library.parent)
    paths = [packages]
    for path in environ.get("PYTHONPATH", "").split(os.pathsep):
        if path and path != packages:
            paths.append(path)

    return {"PYTHONPATH": os.pathsep.join(paths)}


@dataclass(frozen=True, slots=True)
class Profile:
    """What one version has.

    A Torch sampler beside a C++ one ignores seeds, min_p, penalties and no_repeat_ngram_size, and
    of a prompt it reports the log-probs of the best tokens, not those of the prompt's own.
    """

    # The version.
    name: str
    # Whether generate_async has an argument for it.
    takes_priority: bool
    # Whether it has one beside the Torch sampler.
    has_cpp_sampler: bool
    # Whether the C++ sampler searches beams where nobody chose a sampler. Then 0 asks for no
    # log-probs.
    has_cpp_beams: bool


def installed(generate_async: Callable[..., object]) -> Profile:
    """The profile of the installed package, whose method this is. Raises PackageNotFoundError."""
    takes_priority = "priority" in inspect.signature(generate_async).parameters
    return of_version(version("tensorrt_llm"), takes_priority=takes_priority)


def of_version(text: str, *, takes_priority: bool) -> Profile:
    """1.3.0rc26 is the first version of which a page says that the Torch sampler is the only one.
    Raises ValueError.
    """
    match = NUMBERS.match(text)
    if match is None:
        raise ValueError(f"{text!r} is no version of TensorRT-LLM")

    major, minor, patch, candidate = match.groups()
    # A release follows all of its candidates.
    candidate_number = math.inf if candidate is None else int(candidate)
    number = (int(major), int(minor), int(patch or 0), candidate_number)

    return Profile(
        text,
        takes_priority,
        has_cpp_sampler=number < (1, 3, 0, 26),
        has_cpp_beams=number < (1, 3, 0, 0),
    )


def explained(error: BaseException, model: str, config: EngineConfig) -> StartError:
    """Explain `error`, which ended the start. A process of TensorRT-LLM reports its own as the
    cause of another.
    """
    if isinstance(error, StartError):
        return error

    bad_values = refusal(error, lambda place: named(config, ".".join(map(str, place))))
    if bad_values is not None:
        return bad_values

    chain = _linked(error, lambda later: later.__cause__ or later.__context__)
    for pattern, advice in ADVICE.items():
        for linked in chain:
            text = _text(linked)
            match = re.search(pattern, text, re.I)
            if match is None:
                continue

            telling = match[0].partition("\n")[0]
            line = next(line for line in text.splitlines() if telling in line)
            kind = NoMemory if advice is OUT_OF_MEMORY else ModelUnusable
            return kind(f"{model}: TensorRT-LLM cannot start: {first_line(line)}; {advice}")

    root = _linked(error, lambda later: later.__cause__)[-1]
    return ModelUnusable(f"{model}: TensorRT-LLM cannot start: {first_line(_text(root))}")


def _linked(
    error: BaseException, before: Callable[[BaseException], BaseException | None]
) -> list[BaseException]:
    """The error and those that led to it, each after the one that it caused."""
    chain: list[BaseException] = []
    earlier: BaseException | None = error
    while earlier is not None and earlier not in chain:
        chain.append(earlier)
        earlier = before(earlier)

    return chain


def _text(error: BaseException) -> str:
    return str(error).strip() or type(error).__name__


HANDLER = Handler(
    load="handlers.lmi_trtllm:load",
    library="tensorrt_llm",
    distributions=("tensorrt-llm",),
    # The reference names its image so.
    other_names=("tensorrt-llm",),
    defaults=DEFAULTS,
    sampling_defaults=SAMPLING,
    uses=frozenset({"option.trust_remote_code"}),
    unused={f"option.{name}": why for name, why in IGNORED.items()},
    means={f"option.{name}": target for name, target in TRANSLATED.items()},
    # It is the engine's batch. Without it the other option is.
    wins=frozenset({"option.max_num_sequences"}),
    caveat=CHECKED,
    option_names=option_names,
    check=check,
    environment=environment,
    describe=lambda: CHECKED,
)
