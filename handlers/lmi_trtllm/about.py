"""The Handler record of TensorRT-LLM. It does not import tensorrt_llm: argument names are read from its source text."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from handlers.base.engine_arguments import fields_by_class
from handlers.lmi_trtllm.options import (
    CONFIG_CLASSES,
    LACKING,
    OPTIONS,
    QUANTISE_BEFORE,
    Forbidden,
    Ignored,
    Translated,
)
from lmi.settings.config import EngineConfig, SamplingDefaults, SamplingValues
from lmi.settings.handler import Handler, folder_of

CHECKED = (
    "checked against the published sources of TensorRT-LLM's main of October 2025 and of August 2026, never run on the "
    "wheel"
)
NOTHING_IS_SENT = {"TRTLLM_NO_USAGE_STATS": "1", "TELEMETRY_DISABLED": "1", "DO_NOT_TRACK": "1"}
ARGUMENT_CLASSES = ("BaseLlmArgs", "TorchLlmArgs")
# Ranks on one machine need no network: TensorRT-LLM's answer to a single node that hangs. A container rarely may read
# another process's memory (CMA), which shared memory of Open MPI 4 would use for large messages.
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
    """The arguments of the installed LLM and the options of its table, or None if TensorRT-LLM is not installed."""
    own = frozenset[str]().union(*(_classes().get(name, ()) for name in ARGUMENT_CLASSES)) - {"model_config"}
    ignored = {name for name, row in OPTIONS.items() if isinstance(row, Ignored)}
    return (own | OPTIONS.keys()) - ignored if own else None


def _classes() -> Mapping[str, frozenset[str]]:
    return fields_by_class("tensorrt_llm", "llmapi", "llm_args.py")


def check(config: EngineConfig) -> Mapping[str, str]:
    """Refuse what this engine cannot do, and what the installed line lacks, with the reason."""
    faults = {f"option.{name}": reason for name, reason in (*_refused(config), *_lacking(config))}
    if config.device == "cpu":
        faults["option.device"] = "auto or cuda on trtllm"
    if config.speculative is not None:
        faults["option.speculative"] = OWN_SPECULATION
    if (config.quantize or "").lower() == "smoothquant":
        faults["option.quantize"] = QUANTISE_BEFORE
    return faults


def _refused(config: EngineConfig) -> list[tuple[str, str]]:
    rows = ((name, text, OPTIONS.get(name)) for name, text in config.options.items())
    return [
        (name, row.allowed)
        for name, text, row in rows
        if isinstance(row, Forbidden) and text.lower() not in (value.lower() for value in row.harmless)
    ]


def _lacking(config: EngineConfig) -> list[tuple[str, str]]:
    """Each option whose argument the installed TensorRT-LLM lacks, as far as its source text says."""
    classes = _classes()
    faults = []
    for name in config.options.keys() & (OPTIONS.keys() | LACKING.keys()):
        row = OPTIONS.get(name, Translated(name))
        if isinstance(row, Translated) and not _has(classes, row.target):
            why = LACKING.get(row.target)
            faults.append((name, f"nothing: this TensorRT-LLM has no {row.target}" + (f", {why}" if why else "")))
    return sorted(faults)


def _has(classes: Mapping[str, frozenset[str]], target: str) -> bool:
    """Whether an argument exists. What the text does not show counts as existing."""
    argument, _, field = target.partition(".")
    if not field:
        return argument in classes.get(ARGUMENT_CLASSES[-1], {argument})
    return field in classes.get(CONFIG_CLASSES.get(argument, ""), {field})


def environment(config: EngineConfig, environ: Mapping[str, str], slot: int, folder: str) -> Mapping[str, str]:
    """Forbid reports of usage, give the ranks their GPUs, and take packages from where TensorRT-LLM is.

    A variable that the operator has set keeps its value, but for the GPUs.
    """
    wanted = {name: value for name, value in (NOTHING_IS_SENT | OF_MPI).items() if name not in environ}
    num_each = len(config.device_ids) // config.num_engines
    if gpus := config.device_ids[slot * num_each : (slot + 1) * num_each]:
        wanted["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return {**wanted, **base_packages(environ)}


def base_packages(environ: Mapping[str, str], own: str = sys.prefix) -> Mapping[str, str]:
    """The variable with which a process, and those that it starts, take packages first from where TensorRT-LLM is.

    lmi's environment lies on top of that one, as in the image, and has newer versions of some packages there: its
    huggingface_hub ends the import of the transformers that TensorRT-LLM 1.2 pins. It is empty if TensorRT-LLM is in
    lmi's own environment, the folder `own`, or not installed.
    """
    library, given = folder_of("tensorrt_llm"), environ.get("PYTHONPATH", "")
    if library is None or library.is_relative_to(own):
        return {}
    below = str(library.parent)
    paths = [path for path in given.split(os.pathsep) if path and path != below]
    return {"PYTHONPATH": os.pathsep.join([below, *paths])}


HANDLER = Handler(
    load="handlers.lmi_trtllm:load",
    library="tensorrt_llm",
    distributions=("tensorrt-llm",),
    other_names=("tensorrt-llm",),  # as the reference names its image
    defaults=DEFAULTS,
    sampling_defaults=SAMPLING,
    uses=frozenset({"option.trust_remote_code"}),
    unused={f"option.{name}": row.why for name, row in OPTIONS.items() if isinstance(row, Ignored)},
    means={f"option.{name}": row.target for name, row in OPTIONS.items() if isinstance(row, Translated)},
    wins=frozenset({"option.max_num_sequences"}),  # the engine's batch; without it the other one is
    caveat=CHECKED,
    option_names=option_names,
    check=check,
    environment=environment,
    describe=lambda: CHECKED,
)
