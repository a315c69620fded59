"""The command and the environment of an engine with several ranks: mpirun starts them, under `trtllm-llmapi-launch`.

Without that launcher the library spawns its ranks from the engine process, in a session that only Open MPI's own daemon
watches. Under mpirun the death of any rank ends all of them. Checked with Open MPI 4 and a program that does what the
published launcher does, never with TensorRT-LLM, which this module does not import.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from handlers.lmi_trtllm import hosts
from handlers.lmi_trtllm.ranks import gpus_of, num_nodes, num_ranks
from lmi.errors import BadConfiguration
from lmi.settings.config import EngineConfig
from lmi.settings.handler import Launcher

LAUNCHER = "trtllm-llmapi-launch"
EXPORTED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")  # to the ranks on other nodes
EXPORTED_PREFIXES = ("TLLM_", "TRTLLM_", "NCCL_", "UCX_", "HF_")
# Ranks on one machine need no network: TensorRT-LLM's answer to a single node that hangs. A container rarely may read
# another process's memory (CMA), which shared memory of Open MPI 4 would use for large messages.
ON_ONE_MACHINE = {
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "OMPI_MCA_oob_tcp_if_include": "lo",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
}


def launcher(config: EngineConfig) -> Launcher | None:
    """What starts the engine process; None if it has one rank, or takes no requests on this node."""
    if num_ranks(config) == 1 or hosts.rank_of(config) > 0:
        return None
    return partial(command, config)


def command(config: EngineConfig, own: Sequence[str], folder: Path, beat: Callable[[], None]) -> list[str]:
    """Return mpirun's command, once every node is there. Rank 0 runs `own`, and the library its part of each rank.

    Raises StartError for what is not installed, for words that the launcher would split, and for missing nodes.
    """
    if split := [word for word in own if len(word.split()) != 1 or set(word) & set("*?[")]:
        raise BadConfiguration(f"{LAUNCHER} splits words at spaces and expands * ? [, so {split[0]!r} cannot be passed")
    mpirun, launcher = hosts.found("mpirun"), hosts.found(LAUNCHER)
    # Open MPI would bind two ranks to one core each, and rank 0 holds the engine process too.
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(num_ranks(config))]
    if num_nodes(config) > 1:
        options += [*hosts.options(config, folder / "ssh", beat), *_exported(os.environ)]
    return [mpirun, *options, launcher, *own]


def _exported(environ: Mapping[str, str]) -> list[str]:
    """Return the options that give variables to ranks on other nodes. Those on this machine inherit all."""
    names = [name for name in environ if name in EXPORTED or name.startswith(EXPORTED_PREFIXES)]
    return [word for name in sorted(names) for word in ("-x", name)]


def environment(config: EngineConfig, environ: Mapping[str, str], slot: int) -> dict[str, str]:
    """The variables of Open MPI, unless the operator has set them, and the GPUs of the engine in this slot."""
    wanted = ON_ONE_MACHINE if num_nodes(config) == 1 else {}
    variables = {name: value for name, value in wanted.items() if name not in environ}
    if gpus := gpus_of(config, slot):
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return variables
