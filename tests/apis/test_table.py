"""The status and the shape of each error at the LMI API."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lmi.apis.base.api import AnyApi
from lmi.apis.base.body import PROMPTS
from lmi.apis.lmi.api import LMI
from lmi.apis.lmi.schema import LmiFormat
from lmi.apis.openai.api import OPENAI_CHAT, OPENAI_COMPLETIONS
from lmi.apis.table import APIS, BY_ROUTE
from lmi.description.document import document
from lmi.errors import (
    DeadlineExceeded,
    GenerationFailed,
    InvalidParameter,
    InvalidRequest,
    LmiError,
    MalformedRequest,
    OutOfMemory,
    Overloaded,
    Unavailable,
    UnknownAdapter,
    Unsupported,
)
from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig
from lmi.types import OutputFormat

TESTS = Path(__file__).parent.parent
SHAPE_1 = ["error", "code"]
SHAPE_2 = ["generated_text", "details", "error", "code"]
SHAPE_2_STREAM = ["token", "generated_text", "details", "error", "code"]
MEDIA_TYPES = {
    OutputFormat.JSON: "application/json",
    OutputFormat.JSONLINES: "application/jsonlines",
    OutputFormat.SSE: "text/event-stream",
}
# error, whether the request was accepted, status, shape
ROWS: list[tuple[LmiError, bool, int, int]] = [
    (MalformedRequest("the body is not JSON"), False, 424, 1),
    (InvalidParameter("parameters.top_p", "at most 1", 2), False, 424, 2),
    (InvalidParameter("inputs", "shorter than the context of 8 tokens", "9 tokens"), False, 424, 2),
    (Unsupported("adapters", "no adapter is loaded"), False, 424, 2),
    (InvalidParameter("end_id", "smaller", 9), True, 424, 2),
    (InvalidRequest("the engine refused the request"), False, 424, 2),
    (GenerationFailed("not finite"), True, 424, 2),
    (DeadlineExceeded("over 5 s"), True, 504, 2),
    (DeadlineExceeded("over 5 s"), False, 504, 2),
    (OutOfMemory("no memory"), True, 507, 2),
    (Unavailable("the engine was lost"), True, 503, 2),
    (Unavailable("the model is loading"), False, 503, 1),
    (Overloaded("1000 requests wait"), False, 503, 1),
    (LmiError("a fault of ours"), False, 500, 1),
    (LmiError("a fault of ours"), True, 500, 2),
]


def _object(body: bytes, output_format: OutputFormat) -> dict[str, Any]:
    if output_format is OutputFormat.SSE:
        assert body.startswith(b"data: ") and body.endswith(b"\n\n")
    elif output_format is OutputFormat.JSONLINES:
        assert body.endswith(b"}\n")
    else:
        assert body.endswith(b"}")

    fields: dict[str, Any] = json.loads(body.removeprefix(b"data: "))
    return fields


@pytest.mark.parametrize("tgi_compat", [False, True])
@pytest.mark.parametrize("output_format", OutputFormat)
@pytest.mark.parametrize(("error", "accepted", "status", "shape"), ROWS)
def test_each_error_has_its_status_and_its_shape_in_the_answer_s_own_framing(
    error: LmiError,
    accepted: bool,
    status: int,
    shape: int,
    output_format: OutputFormat,
    tgi_compat: bool,
) -> None:
    format = LmiFormat(output_format=output_format, tgi_compat=tgi_compat)
    rendered = LMI.errors.render(error, format, accepted=accepted)
    form = output_format if shape == 2 else OutputFormat.JSON
    keys = SHAPE_1 if shape == 1 else SHAPE_2 if form is OutputFormat.JSON else SHAPE_2_STREAM
    fields = _object(rendered.body, form)

    assert (rendered.status, rendered.media_type) == (status, MEDIA_TYPES[form])
    assert list(fields) == (keys + ["error_type"] if tgi_compat else keys)
    assert (fields["error"], fields["code"]) == (str(error), status)


@pytest.mark.parametrize(
    ("error", "accepted", "kind"),
    [
        (MalformedRequest("x"), False, "validation"),
        (Unsupported("n", "x"), False, "validation"),
        (Overloaded("x"), False, "overloaded"),
        (Unavailable("x"), False, "overloaded"),
        (Unavailable("x"), True, "generation"),
        (GenerationFailed("x"), True, "generation"),
        (DeadlineExceeded("x"), True, "generation"),
    ],
)
def test_a_tgi_client_learns_the_class_of_the_error(
    error: LmiError, accepted: bool, kind: str
) -> None:
    rendered = LMI.errors.render(error, LmiFormat(tgi_compat=True), accepted=accepted)
    assert json.loads(rendered.body)["error_type"] == kind


def test_a_503_tells_when_to_come_back_and_nothing_else_has_headers() -> None:
    for error, accepted, status, _ in ROWS:
        headers = LMI.errors.render(error, LmiFormat(), accepted=accepted).headers

        assert headers.get("Retry-After") == ("1" if status == 503 else None)
        assert bool(headers) == (status == 503)
        assert headers.get("X-Lmi-Refusal", error.label) == error.label


@pytest.mark.parametrize("status", [404, 405, 408, 413, 415, 431])
def test_an_error_of_http_alone_is_of_the_first_shape(status: int) -> None:
    rendered = LMI.errors.render_status(
        status, "at most 67108864 bytes", LmiFormat(output_format=OutputFormat.SSE)
    )
    expected = b'{"error": "at most 67108864 bytes", "code": %d}' % status

    assert (rendered.status, rendered.media_type, rendered.body) == (
        status,
        "application/json",
        expected,
    )

    rendered = LMI.errors.render_status(status, "x", LmiFormat(tgi_compat=True))
    assert list(json.loads(rendered.body)) == ["error", "code", "error_type"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            InvalidParameter("num_top_log_probs", "at most 20", 50),
            "parameters.logprobs must be at most 20, given 50",
        ),
        (
            Unsupported("typical_p", "vllm has no typical sampling"),
            "parameters.typical_p is not supported here: vllm has no typical sampling",
        ),
        (
            Unsupported("lora_config", "adapters are off"),
            "adapters is not supported here: adapters are off",
        ),
        (
            InvalidParameter("inputs", "shorter", "9 tokens"),
            "inputs must be shorter, given '9 tokens'",
        ),
        (
            InvalidRequest("must be at most 8, given 9", "max_tokens"),
            "parameters.max_new_tokens must be at most 8, given 9",
        ),
        (InvalidRequest("max_tokens may begin any text"), "max_tokens may begin any text"),
        (GenerationFailed("seed of the error"), "seed of the error"),
    ],
)
def test_an_engine_s_refusal_is_told_in_the_client_s_words(error: LmiError, message: str) -> None:
    assert json.loads(LMI.errors.render(error, LmiFormat(), accepted=True).body)["error"] == message


@pytest.mark.parametrize("api", [OPENAI_CHAT, OPENAI_COMPLETIONS], ids=["chat", "completions"])
def test_an_adapter_that_is_not_loaded_is_a_model_that_openai_s_client_does_not_find(
    api: AnyApi,
) -> None:
    error = UnknownAdapter("Adapter de is not registered")
    format = api.default_format(ModelConfig(path="demo", name="demo"))
    rendered = api.errors.render(error, format, accepted=False)
    refusal = json.loads(rendered.body)["error"]
    assert (rendered.status, refusal["code"], refusal["param"]) == (404, "model_not_found", "model")
    assert refusal["message"] == "Adapter de is not registered"


def test_a_body_that_cannot_be_read_is_answered_as_json_whatever_the_model_s_formatter() -> None:
    model = ModelConfig(path="demo", name="demo", output_formatter="sse", tgi_compat=True)
    assert LMI.default_format(model) == LmiFormat(output_format=OutputFormat.JSON, tgi_compat=True)


def test_an_api_is_found_under_its_name() -> None:
    assert APIS["lmi"] is LMI


def test_each_field_that_chooses_an_api_at_invocations_belongs_to_one_api_and_is_read() -> None:
    fields = [api.body_field for api in APIS.values() if api.body_field]
    assert len(fields) == len(set(fields))
    assert set(fields) <= set(PROMPTS)


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
def test_each_api_has_golden_files_tests_of_its_own_and_its_answers_at_invocations(
    api: AnyApi,
) -> None:
    module = api.parse.__module__.removeprefix("lmi.apis.").partition(".")[0]
    assert list((TESTS / "golden" / api.name).glob("*.request")), "golden files"
    assert list((TESTS / "apis" / module).glob("test_*.py")), "a folder of tests"

    model = ModelConfig(path="demo", name="demo")
    described = document(Config(server=ServerConfig(), model=model, engine=EngineConfig()))
    schemas = described["components"]["schemas"]
    failures = described["components"]["responses"]
    for path in BY_ROUTE.keys() & set(api.paths):
        answers = described["paths"][path]["post"]["responses"]
        ok = _schemas_in(schemas["AnswerOfRoute"], schemas["LineOfRoute"], schemas["EventOfRoute"])

        assert _schemas_in(answers.pop("200")) <= ok, "ANSWERS and EVENTS"

        failed = [failures[answer["$ref"].rpartition("/")[2]] for answer in answers.values()]
        assert _schemas_in(*failed) <= _schemas_in(schemas["ErrorOfRoute"]), "ErrorOfRoute"


def _schemas_in(*parts: dict[str, Any]) -> set[str]:
    return set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(parts)))
