"""Parses `load_models`, which is `-m` and SERVING_LOAD_MODELS of the reference.

    test::MPI=/opt/ml/model       NAME:VERSION:ENGINE:DEVICE=URL, of which only the URL is required
    [test]=file:/opt/ml/model     the name may have brackets
    file:///opt/ml/model          a URL or a path; commas or blanks separate several models
    ALL, NONE                     these name no model

Source: the start-up arguments of djl-serving. This module does not look at folders.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True, slots=True)
class NamedModel:
    """One model of `load_models`. `name` and `engine` may be empty; version and device have no meaning here."""

    url: str
    name: str = ""
    engine: str = ""

    def __str__(self) -> str:
        return f"{self.name}::{self.engine}={self.url}" if self.name or self.engine else self.url


def parse(text: str) -> tuple[NamedModel, ...]:
    """Return the models that `text` names. Raises ValueError for an entry of another form."""
    return () if text.upper() in ("ALL", "NONE") else tuple(map(_entry, re.split(r"[,\s]+", text.strip())))


def local_path(url: str) -> str:
    """Return the path of a `file:` URL, or any other text unchanged."""
    return unquote(urlsplit(url).path) if url.startswith("file:") else url


def _entry(text: str) -> NamedModel:
    head, equals, url = text.partition("=")
    if not equals or "/" in head:  # a URL or a path without a name
        head, url = "", text
    if not url:
        raise ValueError
    head = head[1:-1] if head.startswith("[") and head.endswith("]") else head
    name, _version, engine, *_device = [*head.split(":"), "", ""]
    return NamedModel(url, name, engine)
