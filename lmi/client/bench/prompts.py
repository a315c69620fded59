"""The prompts of a load: those of a file, or made of words."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import click
import orjson

from lmi.client.bench.dialects import Ask

WORDS = (
    "time",
    "river",
    "stone",
    "light",
    "paper",
    "green",
    "seven",
    "window",
    "garden",
    "music",
    "horse",
    "winter",
    "letter",
    "bridge",
    "cloud",
    "table",
)


def of_file(path: Path, max_tokens: int) -> Iterator[Ask]:
    """Yield the prompts of a file without end: each line, and after the last the first again. A
    line is a text, or an object with prompt and max_tokens.

    Raises ClickException for a file without prompts, and for a line that begins as an object and is
    none.
    """
    text = path.read_text(encoding="utf-8-sig")
    lines = [line for line in text.splitlines() if line.strip()]
    asks = [_ask_of(line, number, max_tokens) for number, line in enumerate(lines, 1)]
    if not asks:
        raise click.ClickException(f"{path}: no prompts")

    return itertools.cycle(asks)


def _ask_of(line: str, number: int, max_tokens: int) -> Ask:
    if not line.startswith("{"):
        return Ask(line, max_tokens)

    try:
        row = orjson.loads(line)
        return Ask(str(row["prompt"]), int(row.get("max_tokens", max_tokens)))
    except (ValueError, TypeError, KeyError) as error:
        raise click.ClickException(
            f"prompt {number}: not an object with prompt and max_tokens: {error}"
        ) from None


def synthetic(
    num_words: int, num_shared_words: int, num_prefixes: int, max_tokens: int, seed: int
) -> Iterator[Ask]:
    """Yield prompts of `num_words` words. The first `num_shared_words` are one of `num_prefixes`
    beginnings.
    """
    dice = random.Random(seed)
    num_shared = min(num_shared_words, num_words)
    prefixes = [dice.choices(WORDS, k=num_shared) for _ in range(num_prefixes)]
    while True:
        prefix = dice.choice(prefixes)
        words = dice.choices(WORDS, k=num_words - len(prefix))
        yield Ask(" ".join([*prefix, *words]), max_tokens)
