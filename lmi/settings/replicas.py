"""Chooses the GPUs that may be used, and how many replicas of the model run on them."""

from lmi.errors import BadConfiguration
from lmi.settings.config import EngineConfig
from lmi.settings.handler import Handler
from lmi.settings.steps import Resolution
from lmi.settings.table import find
from lmi.settings.values import Values

TENSOR = "option.tensor_parallel_degree"
PIPELINE = "option.pipeline_parallel_degree"


def choose_gpus(resolution: Resolution) -> None:
    """Choose the GPUs that replicas may have: all that are visible, or those that options name."""
    values = resolution.values
    visible = resolution.start.machine.gpus
    device = values.final("option.device")
    if device == "cuda" and not visible:
        values.refuse("option.device", "auto or cpu, since no GPU is visible")

    gpus = () if device == "cpu" else visible
    resolution.gpus = gpus
    numbers = values.given("load_on_devices")
    if numbers is None:
        return

    if any(int(number) >= len(gpus) for number in numbers):
        allowed = f"* or numbers below {len(gpus)}" if gpus else "*, since no GPU is used"
        values.refuse("load_on_devices", allowed)
        return

    resolution.gpus = tuple(gpus[int(number)] for number in numbers)


def place_replicas(resolution: Resolution) -> None:
    """Choose as many replicas as fit, and the number for a degree of `max`. Refuse what the engine
    cannot run with.
    """
    values = resolution.values
    handler = resolution.chosen_engine.handler
    gpus = resolution.gpus
    # After a fault, later steps find one replica.
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
    refused = handler.check(config)
    for key, allowed in refused.items():
        values.refuse(key, allowed)

    if refused.keys() & {TENSOR, PIPELINE}:
        return

    gpus_each = config.num_ranks_here(values.final(TENSOR) * values.final(PIPELINE))
    number = _num_replicas(values, handler, len(gpus), gpus_each)
    if number is not None:
        resolution.num_engines = number
        resolution.device_ids = gpus[: number * gpus_each]


def _num_replicas(values: Values, handler: Handler, num_gpus: int, gpus_each: int) -> int | None:
    """Return how many replicas there are, or None after a fault of the options that say it."""
    is_on_cluster = any(values.given(key) == text for key, text in handler.on_cluster.items())
    if is_on_cluster:
        # The GPUs of this machine are no limit, which 0 says.
        num_gpus = 0

    try:
        return num_engines(
            num_gpus, gpus_each, values.given("minWorkers"), values.given("maxWorkers")
        )
    except BadConfiguration as error:
        keys = [key for key in ("minWorkers", "maxWorkers") if key in values]
        sources = ", ".join(values.how_given(key).source for key in keys)
        values.fail(f"{error} ({sources})" if sources else str(error))
        return None


def num_engines(num_gpus: int, gpus_each: int, low: int | None, high: int | None) -> int:
    """Return how many replicas fit, at least `low` and at most `high`. Raises BadConfiguration if
    `low` do not fit.

    Without GPUs the default is one replica, because one uses all cores.
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
    """Return the options that were given and are not in the table, by name without `option.`."""
    options: dict[str, str] = {}
    for key, winner in values.picked.items():
        if key.startswith("option.") and find(key) is None:
            options[key.removeprefix("option.")] = winner.value

    return options
