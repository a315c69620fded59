"""The bytes of each API, file by file: tests/golden/<api>/<case>.request gives <case>.response.

A request file holds the body, the model's settings, the Deltas of an engine, and the error that
ends the answer. Python's json module wrote the responses from objects put together by hand; the
formatters never wrote them. A value that is new in every answer, an id, the time or a drawn seed,
is `ID` or 0 there.
"""

from __future__ import annotations

import json
import re
from array import array
from pathlib import Path
from typing import Any

import pytest

from lmi import errors
from lmi.apis.base.api import AnyApi
from lmi.apis.table import APIS
from lmi.errors import LmiError
from lmi.executor import Tensor
from lmi.settings.config import ModelConfig
from lmi.types import AnswerEnd, Delta, Token

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = sorted(f"{path.parent.name}/{path.stem}" for path in GOLDEN.glob("*/*.request"))


def _token(fields: dict[str, Any]) -> Token:
    top = fields.get("top")
    return Token(
        **fields | {"top": None if top is None else [_token(alternative) for alternative in top]}
    )


def _embedding(numbers: list[float]) -> Tensor:
    return Tensor((len(numbers),), "float32", array("f", numbers).tobytes())


def _delta(fields: dict[str, Any]) -> Delta:
    prefill = fields.get("prefill")
    finish_reason = fields.get("finish_reason")
    return Delta(
        tokens=[_token(token) for token in fields["tokens"]],
        finish_reason=None if finish_reason is None else AnswerEnd(finish_reason),
        prefill=None if prefill is None else [_token(token) for token in prefill],
        num_prompt_tokens=fields.get("num_prompt_tokens", 0),
        num_cached_tokens=fields.get("num_cached_tokens", 0),
        prompt=fields.get("prompt", ""),
        index=fields.get("index", 0),
        prompt_token_ids=fields.get("prompt_token_ids", ()),
        is_followed=fields.get("is_followed", False),
        stop_reason=fields.get("stop_reason"),
        embedding=_embedding(fields["embedding"]) if "embedding" in fields else None,
    )


def _settled(body: bytes) -> bytes:
    body = re.sub(rb'(id":"[a-z]+[-_])[0-9a-f]{24,32}"', rb'\1ID"', body)
    body = re.sub(rb'"seed":[0-9]{6,}', b'"seed":0', body)
    return re.sub(rb'"(created|created_at|completed_at)":[0-9]{10}', rb'"\1":0', body)


def _answer(api: AnyApi, case: dict[str, Any]) -> tuple[int, str, bytes]:
    """Status, content type and body, put together as a route does."""
    model = ModelConfig(path="demo", name="demo", **case.get("model", {}))
    body = case["body"] if isinstance(case["body"], str) else json.dumps(case["body"])
    format = api.default_format(model)
    accepted = False
    records = list[bytes]()
    try:
        message = api.read(body.encode(), case["content_type"], model)
        format = message.format
        parsed = api.parse(message)
        format = parsed.format
        formatter = api.formatter(parsed)
        for delta in case.get("deltas", []):
            records += formatter.feed(_delta(delta))

        if "error" in case:
            error = case["error"]
            accepted = error["accepted"]
            raise getattr(errors, error["class"])(
                **{name: error[name] for name in ("message", "field") if name in error}
            )

        return 200, formatter.media_type, api.whole(formatter.media_type, b"".join(records))
    except LmiError as error:
        rendered = api.errors.render(error, format, accepted=accepted)
        status = 200 if records else rendered.status
        body = b"".join([*records, rendered.body])
        return (
            status,
            rendered.media_type,
            body if records else api.whole(rendered.media_type, body),
        )


@pytest.mark.parametrize("name", CASES)
def test_an_answer_has_exactly_the_bytes_of_its_golden_file(name: str) -> None:
    case = json.loads((GOLDEN / f"{name}.request").read_text())
    expected = (GOLDEN / f"{name}.response").read_bytes()
    status, media_type, body = _answer(APIS[name.partition("/")[0]], case)

    assert (status, media_type, _settled(body)) == (case["status"], case["media_type"], expected)


def test_the_golden_files_are_there_and_none_is_an_orphan() -> None:
    assert len(CASES) > 50
    assert (
        sorted(f"{path.parent.name}/{path.stem}" for path in GOLDEN.glob("*/*.response")) == CASES
    )
