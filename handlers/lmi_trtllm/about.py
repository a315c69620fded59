"""What settings know of TensorRT-LLM without importing it.

All of this package was written from the published sources of main of October 2025 and of August
2026, pages of 1.3.0rc24 and rc26, and pull requests between them; none is of a release.
"""

import os
import sys
from collections.abc import Mapping

from handlers.driven.arguments import fields_by_class
from handlers.lmi_trtllm.options import (
    CONFIG_CLASSES,
    FORBIDDEN,
    IGNORED,
    LACKING,
    QUANTISE_BEFORE,
    TRANSLATED,
)
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
    """Return what is allowed of each option that this engine cannot follow, or that the installed
    version lacks.
    """
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
    """Return the variables of an engine's process: they forbid reports, give ranks their GPUs, and
    let packages come from where TensorRT-LLM is.

    Where the operator has set one of the first, it stays.
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
