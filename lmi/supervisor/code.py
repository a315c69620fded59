"""How the supervisor starts the processes of user code, and for how long they may work."""

import math
from collections.abc import Mapping

from lmi.runtime import Runtime
from lmi.settings.config import Config
from lmi.supervisor.child import ChildKind
from lmi.supervisor.cores import Cores, of_cores, of_threads
from lmi.supervisor.hangs import HangLimits
from lmi.supervisor.kinds import environ_of, with_installed, without_secrets, worker

# Nothing is ever written to a model's folder.
NOTHING_BESIDE_CODE = {"PYTHONDONTWRITEBYTECODE": "1"}


def user_code(runtime: Runtime, cores: Cores | None = None) -> ChildKind:
    """Return the kind of the processes that run a model's own code."""
    config = runtime.config
    cores_of_code = of_cores(cores.others if cores else ())
    user = config.server.user
    module = "lmi.user_code.worker"
    if config.user_code is not None and config.user_code.standards_folder:
        module = "lmi.user_code.standards.worker"

    def environ(slot: int) -> dict[str, str]:
        return of_user_code(config, environ_of(runtime.path, user), slot) | cores_of_code

    return worker(
        config,
        user=user,
        title="code {slot}",
        module=module,
        output_logger="model.py",
        environ=environ,
        limits=limits(config),
    )


def of_user_code(config: Config, environ: Mapping[str, str], slot: int) -> dict[str, str]:
    """Return the environment of a process that runs user code. It has no secrets except those of
    option.env.

    What its requirements.txt names comes first on its path. If user code is the model, each process
    sees only its GPUs.
    """
    inherited = without_secrets(environ) | config.engine.environ
    inherited |= with_installed(config, inherited) | NOTHING_BESIDE_CODE
    if not config.is_user_code:
        return inherited

    num_gpus = len(config.engine.device_ids) // config.engine.num_engines
    gpus = config.engine.device_ids[slot * num_gpus : (slot + 1) * num_gpus]
    inherited |= of_threads(config, inherited)
    if gpus:
        inherited["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)

    return inherited


def limits(config: Config) -> HangLimits:
    """Return the limits of user code: `predict_timeout` for a handler, or none, and `step_timeout`
    for a formatter.
    """
    server = config.server
    limit_s = server.predict_timeout_s if config.is_user_code else config.engine.step_timeout_s
    if limit_s is None:
        limit_s = math.inf

    return HangLimits(
        loading_s=config.engine.model_loading_timeout_s,
        first_step_s=limit_s,
        step_s=limit_s,
        step_complaint="worked on one request",
        waiting_counts=False,
    )
