"""The cores and GPUs of this machine, and whether it is a container.

`scripts/install` asks before anything is installed, so this module and what it imports need only Python.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lmi.shared import linux

# What Docker, Podman, Kubernetes, ECS and SageMaker leave in a container.
OF_CONTAINERS = (Path("/.dockerenv"), Path("/run/.containerenv"), Path("/opt/ml"))
CONTAINER_VARIABLES = ("KUBERNETES_SERVICE_HOST", "ECS_CONTAINER_METADATA_URI_V4", "SAGEMAKER_", "SM_")


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores and GPUs that this process may use."""

    num_cores: int
    gpus: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them
    is_container: bool = False

    @classmethod
    def here(cls, environ: Mapping[str, str]) -> Self:
        return cls(linux.num_usable_cores(), cls._gpus(environ), is_container(environ))

    @staticmethod
    def _gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
        present = sorted((path.name[6:] for path in Path("/dev").glob("nvidia[0-9]*")), key=int)
        if not present or not (Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia").exists()):
            return ()
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return tuple(str(number) for number in range(len(present)))
        names = [name.strip() for name in visible.split(",")]
        invalid = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
        return tuple(names[:invalid])  # CUDA too ends the list at the first invalid name


def is_container(environ: Mapping[str, str], files: Iterable[Path] = OF_CONTAINERS) -> bool:
    """Return whether this process runs in a container, whose ports only its runtime opens to a network."""
    is_named = any(name.startswith(CONTAINER_VARIABLES) for name in environ)
    return os.getpid() == 1 or is_named or any(file.exists() for file in files)
