"""What computes a model: a GPU with torch, or a CPU with the native kernels or with torch."""

import logging
import os

from handlers.lmi_dist.config_file import INSTALL_TORCH, check_extra
from handlers.lmi_dist.defaults import QUANTIZE_METHODS
from handlers.lmi_dist.facts import ModelFacts
from handlers.lmi_dist.native import library as native
from lmi.errors import BadConfiguration
from lmi.settings.config import EngineConfig
from lmi.settings.handler import folder_of
from lmi.shared import linux, machine
from lmi.shared.machine import Machine

log = logging.getLogger(__name__)


def choose_device(config: EngineConfig) -> str:
    """Return "cuda" or "cpu". Raises BadConfiguration if an option asks for what is not there."""
    device = "cuda" if config.device != "cpu" and _has_cuda(config) else "cpu"
    is_possible = config.quantize in QUANTIZE_METHODS and device == "cpu"
    if config.quantize is not None and not is_possible:
        methods = " and ".join(sorted(QUANTIZE_METHODS))
        raise BadConfiguration(
            f"option.quantize={config.quantize} on {device}: only {methods} on cpu are built"
        )

    return device


def _has_cuda(config: EngineConfig) -> bool:
    """Return whether torch has a GPU here. Raises BadConfiguration if an option asks for one and it
    has none.
    """
    is_wanted = config.device == "cuda"
    if not is_wanted and not Machine.here(os.environ).gpus:
        return False

    if folder_of("torch") is None:
        if is_wanted:
            raise BadConfiguration(
                f"option.device=cuda needs torch, which is not installed: {INSTALL_TORCH}"
            )

        log.warning(
            "the CPU computes although a GPU is here: without torch lmi-dist cannot use it; %s",
            INSTALL_TORCH,
        )
        return False

    import torch

    is_available = torch.cuda.is_available()
    if is_wanted and not is_available:
        raise BadConfiguration(
            "option.device=cuda, but torch sees no CUDA device here; use cpu or auto"
        )

    return is_available


def choose_library(facts: ModelFacts, device: str, config: EngineConfig) -> native.Library | None:
    """Return the native kernels, or None if torch computes the model, and log which, and why.

    Raises BadConfiguration if an option needs the native kernels and they cannot run.
    """
    try:
        library = _native_library(facts, device)
    except native.NotAvailable as error:
        if config.quantize is not None:
            raise BadConfiguration(
                f"option.quantize={config.quantize} needs the native kernels, but {error}"
            ) from error

        check_extra(facts.path, f"torch would run it, because {error}")
        log.info(
            "kernels: torch, because %s; the last bits of an answer may depend on its neighbours",
            error,
        )
        return None

    log.info("kernels: native %s, on %s", library.kind, describe_threads(native.num_threads()))
    return library


def _native_library(facts: ModelFacts, device: str) -> native.Library:
    """Return the native kernels. Raises NotAvailable if they do not run this model here."""
    if device != "cpu":
        raise native.NotAvailable(f"the native kernels do not run on {device}")

    if facts.architecture is None:
        raise native.NotAvailable(f"only the modules of transformers know {facts.name}")

    return native.load()


def describe_threads(num_threads: int) -> str:
    """Return the number of threads and, if the machine has more cores, why there are not more."""
    threads = f"{num_threads} thread{'s' if num_threads > 1 else ''}"
    num_cores = machine.num_usable_cores()
    if num_threads >= num_cores:
        return threads

    why = os.environ.get(linux.THREADS_WHY, "OMP_NUM_THREADS")
    return f"{threads} (of {num_cores} cores: {why})"
