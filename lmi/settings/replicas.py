"""Chooses the GPUs that may be used, and how many replicas of the model run on them.

A replica is one engine, which spreads the model over the GPUs of its tensor and pipeline degrees.
"""

from lmi.errors import BadConfiguration
from lmi.settings.config import EngineConfig
from lmi.settings.handler import Handler
from lmi.settings.steps import Resolution
from lmi.settings.table import find
from lmi.settings.values import Values

TENSOR = "option.tensor_parallel_degree"
PIPELINE = "option.pipeline_parallel_degree"


def choose_gpus(resolution: Resolution) -> None:
    """Choose the GPUs that replicas may have: all visible ones, or those of `load_on_devices`."""
    values = resolution.values
    gpus = resolution.start.machine.gpus
    device = values.final("option.device")
    if device == "cuda" and not gpus:
        values.refuse("option.device", "auto or cpu, since no GPU is visible")

    if device == "cpu":
        gpus = ()

    resolution.gpus = gpus
    texts = values.given("load_on_devices")
    if texts is None:
        return

    numbers = [int(text) for text in texts]
    if any(number >= len(gpus) for number in numbers):
        allowed = f"* or numbers below {len(gpus)}" if gpus else "*, since no GPU is used"
        values.refuse("load_on_devices", allowed)
        return

    resolution.gpus = tuple(gpus[number] for number in numbers)


def place_replicas(resolution: Resolution) -> None:
    """Choose the tensor degree if it is `max`, and as many replicas as fit.

    Options that the engine cannot run with become faults.
    """
    values = resolution.values
    handler = resolution.chosen_engine.handler
    gpus = resolution.gpus
    # What later steps find after a fault.
    resolution.num_engines = 1
    resolution.device_ids = gpus

    if values.given(TENSOR) == "max":
        max_degree = 1
        if not handler.is_one_device:
            max_degree = max(1, len(gpus) // values.final(PIPELINE))

        values.settle(TENSOR, max_degree, f"max of {len(gpus)} GPUs")

    config = EngineConfig(
        device_ids=gpus, options=_options_without_row(values), **values.fields("engine")
    )
    allowed_by_key = handler.check(config)
    for key, allowed in allowed_by_key.items():
        values.refuse(key, allowed)

    if allowed_by_key.keys() & {TENSOR, PIPELINE}:
        return

    gpus_each = config.num_ranks_here(values.final(TENSOR) * values.final(PIPELINE))
    num_replicas = _num_replicas(values, handler, len(gpus), gpus_each)
    if num_replicas is not None:
        resolution.num_engines = num_replicas
        resolution.device_ids = gpus[: num_replicas * gpus_each]


def _num_replicas(values: Values, handler: Handler, num_gpus: int, gpus_each: int) -> int | None:
    """Return how many replicas run, or None if minWorkers and maxWorkers are at fault."""
    is_on_cluster = any(values.given(key) == text for key, text in handler.on_cluster.items())
    if is_on_cluster:
        # The cluster may place them on other machines, so the GPUs of this one are no limit.
        num_gpus = 0

    low = values.given("minWorkers")
    high = values.given("maxWorkers")
    try:
        return num_engines(num_gpus, gpus_each, low, high)
    except BadConfiguration as error:
        keys = [key for key in ("minWorkers", "maxWorkers") if key in values]
        sources = ", ".join(values.how_given(key).source for key in keys)
        values.fail(f"{error} ({sources})" if sources else str(error))
        return None


def num_engines(num_gpus: int, gpus_each: int, low: int | None, high: int | None) -> int:
    """Return how many replicas fit on so many GPUs, at least `low` and at most `high`.

    Without GPUs that is `low`, or one, which uses all cores. Raises BadConfiguration if `low`
    replicas do not fit, or `low` is more than `high`.
    """
    if low is not None and high is not None and low > high:
        raise BadConfiguration(
            f"minWorkers={low}, maxWorkers={high}: allowed is a minWorkers of at most maxWorkers"
        )

    least = low or 1
    if num_gpus == 0:
        return least

    num_fitting = num_gpus // gpus_each
    if num_fitting < least:
        raise BadConfiguration(
            f"{least} replicas of {gpus_each} GPUs each do not fit: allowed are {num_gpus} GPUs "
            f"in all"
        )

    if high is None:
        return num_fitting

    return min(num_fitting, high)


def _options_without_row(values: Values) -> dict[str, str]:
    """Return the given options that the table does not have, by name without `option.`.

    They are meant for the engine's library.
    """
    options: dict[str, str] = {}
    for key, winner in values.picked.items():
        if key.startswith("option.") and find(key) is None:
            options[key.removeprefix("option.")] = winner.value

    return options
