"""What SageMaker bounds: how long a request may wait, and how long a server may take to end. And
what it does not pass on: keys.
"""

from lmi.settings.steps import Resolution
from lmi.settings.values import Values

# The time that it waits for the answer of a real-time endpoint.
ANSWER_S = 60.0
# The time after SIGTERM at which it kills a container.
KILL_S = 30.0
# The time from the end of `drain_timeout` to the end of the last process.
END_S = 2.5


def warn_of_keys(resolution: Resolution) -> None:
    """Warn of keys on SageMaker, which does not pass them on."""
    values = resolution.values
    has_keys = values.final("option.api_key") or values.final("option.api_key_file")
    if has_keys and _is_here(values):
        values.warn(
            "option.api_key: SageMaker passes on neither Authorization nor x-api-key, so its "
            "requests get 401"
        )


def bound_queue_wait(resolution: Resolution) -> None:
    """Let no request wait longer than the platform waits for its answer. Batch transforms and
    buffered streams have more time.
    """
    values = resolution.values
    if not _is_here(values):
        return

    key = "max_queue_wait"
    has_time = values.final("batch_transform") or values.final("buffer_streams")
    if has_time or values.final(key) <= ANSWER_S:
        return

    waits = f"SageMaker waits {ANSWER_S:g} s for an answer, so they count"
    values.warn(f"{values.how_given(key).assignment}: {waits}")
    values.settle(key, ANSWER_S, "SageMaker")


def warn_of_drain(resolution: Resolution) -> None:
    """Warn of a drain that takes longer than the platform allows."""
    values = resolution.values
    delay_s = values.final("drain_delay")
    timeout_s = values.final("drain_timeout")
    if not _is_here(values) or delay_s + timeout_s + END_S <= KILL_S:
        return

    both = f"drain_delay={delay_s:g}, drain_timeout={timeout_s:g}"
    left_s = KILL_S - END_S
    values.warn(
        f"{both}: SageMaker kills a container {KILL_S:g} s after SIGTERM, both have {left_s:g} s"
    )


def _is_here(values: Values) -> bool:
    """Return whether the server runs on SageMaker, as its variables show."""
    return any(name.startswith("SAGEMAKER_") for name in values.start.environ)
