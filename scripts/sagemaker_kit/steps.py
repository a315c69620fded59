"""What a plan consists of, and the errors that end one.

A plan is a generator of steps. Whoever carries it out sends the answer of each step back into it,
so a plan knows neither boto3 nor a clock. In a dry run every answer is an empty object.
"""

from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """One call of an AWS API. The service has boto3's name, the operation AWS's."""

    service: str
    operation: str
    parameters: dict[str, Any]
    # A pattern of "CODE: message"; the answer to an error that it matches is None
    tolerated: str = ""
    # If it must be another than the user's
    region: str | None = None


@dataclass(frozen=True)
class Wait:
    """A call that is repeated while the member `status` of its answer is one of `pending`."""

    call: Call
    status: str
    pending: frozenset[str]


@dataclass(frozen=True)
class Command:
    """A program that runs on this machine."""

    words: tuple[str, ...]
    stdin: str = field(default="", repr=False)


Step = Call | Wait | Command
# It returns what the user gets on standard output
Plan = Generator[Step, Any, Iterable[bytes]]


class Refused(Exception):
    """The flags cannot be carried out. Exit code 2, and nothing was sent."""


class Failed(Exception):
    """AWS or a program refused or failed. Exit code 1."""
