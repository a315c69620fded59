"""The structure that an answer must have."""

from __future__ import annotations

import enum

import msgspec


class GuideType(enum.IntEnum):
    JSON = 0
    JSON_SCHEMA = 1
    REGEX = 2
    EBNF_GRAMMAR = 3


class GuidedDecodingParams(msgspec.Struct, frozen=True):
    """The structure that the output must have. `guide` may be None only for JSON."""

    guide_type: GuideType
    guide: str | None = None

    def __post_init__(self) -> None:
        if self.guide is None and self.guide_type is not GuideType.JSON:
            raise ValueError(f"guide must be given for {self.guide_type.name}")
