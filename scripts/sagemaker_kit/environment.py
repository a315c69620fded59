"""The container's environment, with the limits that SageMaker documents for it."""

from collections.abc import Iterable, Mapping

from scripts.sagemaker_kit.steps import Refused

MAX_ENTRIES, MAX_ENTRY_BYTES, MAX_BYTES = 100, 1024, 32 * 1024
ADVICE = "put it into the serving.properties beside the model instead"


def parse(pairs: Iterable[str]) -> dict[str, str]:
    """Return the entries of `--env KEY=VALUE`. A key that is given twice with two values is refused."""
    entries: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise Refused(f"--env takes KEY=VALUE, given {pair}")
        if entries.setdefault(key, value) != value:
            raise Refused(f"--env gives {key} twice: {entries[key]} and {value}")
    return entries


def check(entries: Mapping[str, str]) -> None:
    """Refuse an environment that SageMaker would refuse, and name the entry."""
    for key, value in entries.items():
        for what, text in (("name", key), ("value", value)):
            if size(text) > MAX_ENTRY_BYTES:
                named = key if len(key) <= 64 else f"{key[:64]}…"
                raise Refused(f"the {what} of {named} has {size(text)} bytes, at most {MAX_ENTRY_BYTES}: {ADVICE}")
    if len(entries) > MAX_ENTRIES:
        last = list(entries)[-1]
        raise Refused(f"{last} is one of {len(entries)} variables, at most {MAX_ENTRIES}: {ADVICE}")
    total = sum(size(key) + size(value) for key, value in entries.items())
    if total > MAX_BYTES:
        largest = max(entries, key=lambda key: size(entries[key]))
        raise Refused(f"the variables have {total} bytes, at most {MAX_BYTES}; {largest} is the largest: {ADVICE}")


def size(text: str) -> int:
    return len(text.encode())
