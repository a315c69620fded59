"""The largest batch that pays on this machine, measured when a model is loaded.

A step reads all weights, so it makes more tokens of more sequences in hardly more time, until it
computes all the time. From then on a further sequence makes no token more, and only lengthens the
gap between the tokens of all others.
"""

import logging
import time
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from handlers.lmi_dist.limits import SLOTS_PER_EXPRESS_PLACE, Limits
from handlers.lmi_dist.plan import Chunk, Plan
from handlers.lmi_dist.runner import Runner
from lmi.settings.config import EngineConfig

log = logging.getLogger(__name__)

LEAST_BATCH = 8
# The gap between two tokens of a stream. Nobody reads more than 20 tokens/s.
SHORT_GAP_S = 0.05
# A batch of twice the size is worth its longer gap if it makes so many times the tokens per
# second.
LEAST_GAIN = 1.1
# How often a step is measured, as other processes may disturb its caches.
NUM_TRIES = 3
# A step that takes longer is tried twice.
LONG_TRY_S = 0.05
# How much time the measurement may take, as `step_s` counts it.
LEAST_BUDGET_S = 0.3
SHARE_OF_LOAD = 0.05


class BatchChoice(Struct, frozen=True):
    """The sequences of the largest batch, and why not more, for people."""

    num_sequences: int
    why: str


def with_batch(limits: Limits, runner: Runner, config: EngineConfig, load_s: float) -> Limits:
    """Return the limits with the largest batch that pays, where no option says how many sequences
    run at once. `load_s` is how long the load took.
    """
    has_option = config.max_num_sequences is not None and not config.is_batch_default
    # The measured steps are of one prompt, with a token for each slot.
    is_too_short = limits.max_length < limits.num_slots
    if has_option or runner.pooling is not None or is_too_short:
        return limits

    least = min(max(LEAST_BATCH, config.max_beam_width), limits.num_slots)
    budget_s = max(LEAST_BUDGET_S, SHARE_OF_LOAD * load_s)
    choice = choose_batch(measured(runner), least, limits.num_slots, budget_s)
    log.info("batch: %d sequences at once: %s", choice.num_sequences, choice.why)

    return replace(
        limits,
        num_slots=choice.num_sequences,
        num_express=max(1, choice.num_sequences // SLOTS_PER_EXPRESS_PLACE),
        batch_reason=choice.why,
    )


def choose_batch(
    step_s: Callable[[int], float], least: int, most: int, budget_s: float
) -> BatchChoice:
    """The largest batch that pays, of `least` to `most` sequences.

    `step_s` makes a step of so many and says its time. The measurement takes `budget_s` of such
    time, and what the last step takes beyond it.

    A batch may grow to twice its size while its steps stay short, or while it makes LEAST_GAIN
    times the tokens.
    """
    seconds = spent_s = step_s(least)
    if seconds * most / least <= SHORT_GAP_S:
        return BatchChoice(most, f"a step of {most} takes {_ms(seconds * most / least)} at most")

    def best(size: int, first_s: float) -> float:
        nonlocal spent_s
        tries = [first_s]
        num_tries = 2 if first_s > LONG_TRY_S else NUM_TRIES
        while len(tries) < num_tries and spent_s < budget_s:
            tries.append(step_s(size))
            spent_s += tries[-1]

        return min(tries)

    size = least
    seconds = best(least, seconds)
    while size < most and spent_s < budget_s:
        larger = min(2 * size, most)
        first_s = step_s(larger)
        spent_s += first_s
        larger_s = best(larger, first_s)
        if larger_s > SHORT_GAP_S and larger / larger_s < LEAST_GAIN * size / seconds:
            speeds = f"{size / seconds:.0f} tokens/s, one of {larger} {larger / larger_s:.0f}"
            why = f"a batch of {size} makes {speeds} in steps of {_ms(larger_s)}"
            return BatchChoice(size, why)

        size = larger
        seconds = larger_s

    if size == most:
        speed = f"{most / seconds:.0f} tokens/s"
        return BatchChoice(most, f"a batch of {most} makes {speed} in steps of {_ms(seconds)}")

    return BatchChoice(size, f"a step of {size} takes {_ms(seconds)}, too long to try more")


def measured(runner: Runner) -> Callable[[int], float]:
    """What makes a step of so many rows, all of the same prompt, and says how long it took.

    It counts the time in which this thread had a core, which computes its share of every step. So
    who loads a model beside other processes, which may be gone soon, chooses as who loads it alone.
    """

    def step_s(num_rows: int) -> float:
        rows = Chunk(0, 0, [0] * num_rows, num_rows, [0])
        started_s = time.thread_time()
        runner.forward(Plan([], [rows]))
        return time.thread_time() - started_s

    return step_s


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"
