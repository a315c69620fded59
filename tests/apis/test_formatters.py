"""Laws that hold for every answer, with any tokens in any pieces."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lmi.apis.base.body import Parsed
from lmi.apis.base.errors import ErrorFields
from lmi.apis.base.formatters import Formatter
from lmi.apis.lmi.api import LMI
from lmi.apis.lmi.schema import LmiFormat
from lmi.apis.openai import schema as openai
from lmi.apis.openai.api import OPENAI_COMPLETIONS
from lmi.apis.openai.formatter import CompletionStream, offsets_in
from lmi.apis.tgi import schema as tgi
from lmi.apis.tgi.formatter import TgiStream
from lmi.executor import SamplingConfig
from lmi.settings.config import ModelConfig
from lmi.types import AnswerEnd, Delta, GenerationRequest, OutputFormat, Token

MODEL = ModelConfig(path="demo", name="demo")
STREAMS = (OutputFormat.JSONLINES, OutputFormat.SSE)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
SEPARATORS = "\x85\u2028\u2029"
LOG_PROB = (
    st.none()
    | st.floats(-20, 0).map(lambda x: round(x, 3))
    | st.sampled_from([math.nan, -math.inf, math.inf])
)
PLAIN = st.builds(
    Token, id=st.integers(0, 2**31), text=TEXT, log_prob=LOG_PROB, is_special=st.booleans()
)
TOKENS = st.lists(PLAIN, min_size=1, max_size=8)


def _formatter(
    output_format: OutputFormat, *, details: bool = False, tgi_compat: bool = False, **fields: Any
) -> Formatter[LmiFormat]:
    sampling = SamplingConfig(temperature=0.0)
    request = GenerationRequest(prompt="né\n", max_new_tokens=9, sampling=sampling, **fields)
    format = LmiFormat(output_format=output_format, details=details, tgi_compat=tgi_compat)
    return LMI.formatter(Parsed((request,), format))


def _feed(formatter: Formatter[LmiFormat], tokens: list[Token], cut: int) -> list[bytes]:
    """Feed the tokens in Deltas of `cut` tokens; the last Delta has the end."""
    records: list[bytes] = []
    for at in range(0, len(tokens), cut):
        is_last = at + cut >= len(tokens)
        records += formatter.feed(
            Delta(tokens[at : at + cut], AnswerEnd.LENGTH if is_last else None)
        )

    return records


def _objects(records: list[bytes], output_format: OutputFormat) -> list[dict[str, Any]]:
    """The objects that a client reads which splits the decoded text into lines as Python does."""
    lines = b"".join(records).decode().splitlines()
    if output_format is OutputFormat.SSE:
        assert lines[1::2] == [""] * len(records)
        assert all(line.startswith("data: ") for line in lines[::2])

        lines = [line.removeprefix("data: ") for line in lines[::2]]

    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


@pytest.mark.parametrize("output_format", STREAMS)
@given(tokens=TOKENS, cut=st.integers(1, 4))
def test_a_stream_is_one_record_for_each_step_and_its_pieces_make_the_whole_text(
    output_format: OutputFormat, tokens: list[Token], cut: int
) -> None:
    records = _feed(_formatter(output_format, is_streaming=True), tokens, cut)
    objects = _objects(records, output_format)
    steps = [tokens[at : at + cut] for at in range(0, len(tokens), cut)]

    assert [line["token"]["id"] for line in objects] == [step[-1].id for step in steps]
    assert [line["token"]["text"] for line in objects] == [
        "".join(token.text for token in step) for step in steps
    ]
    assert "".join(line["token"]["text"] for line in objects) == objects[-1]["generated_text"]
    assert all(set(line) == {"token"} for line in objects[:-1])
    assert set(objects[-1]) == {"token", "generated_text"}
    assert all(record.endswith(b"\n") for record in records)


@pytest.mark.parametrize("output_format", OutputFormat)
@pytest.mark.parametrize("tgi_compat", [False, True])
@given(
    tokens=st.lists(PLAIN.filter(lambda token: not set(token.text) & set(SEPARATORS)), min_size=1),
    cut=st.integers(1, 4),
)
def test_the_layout_is_that_of_the_json_module_with_text_not_escaped(
    output_format: OutputFormat, tgi_compat: bool, tokens: list[Token], cut: int
) -> None:
    formatter = _formatter(output_format, details=True, tgi_compat=tgi_compat)
    for record in _feed(formatter, tokens, cut):
        line = record.decode().removeprefix("data: ").rstrip("\n")
        assert line == json.dumps(json.loads(line), ensure_ascii=False)


@given(tokens=TOKENS, cut=st.integers(1, 4))
def test_every_format_tells_the_same_answer(tokens: list[Token], cut: int) -> None:
    [body] = _feed(_formatter(OutputFormat.JSON, details=True), tokens, cut)
    whole = json.loads(body)
    for output_format in STREAMS:
        lines = _objects(_feed(_formatter(output_format, details=True), tokens, cut), output_format)
        if cut == 1:
            assert [line["token"] for line in lines] == whole["details"]["tokens"]

        assert lines[-1]["generated_text"] == whole["generated_text"]
        assert lines[-1]["details"] == {key: whole["details"][key] for key in lines[-1]["details"]}
        assert "tokens" not in lines[-1]["details"]


@pytest.mark.parametrize("log_prob", [math.nan, math.inf, -math.inf, None])
@pytest.mark.parametrize("output_format", OutputFormat)
def test_a_log_prob_that_json_cannot_write_is_null(
    output_format: OutputFormat, log_prob: float | None
) -> None:
    token = Token(5, "a", log_prob, top=[Token(6, "b", log_prob)])
    formatter = _formatter(output_format, details=True, num_top_log_probs=1)
    [record] = formatter.feed(Delta([token], AnswerEnd.LENGTH))

    assert record.count(b'"log_prob": null') == 2


@pytest.mark.parametrize("tgi_compat", [False, True])
def test_the_tokens_of_one_step_are_one_record_that_says_what_each_would(tgi_compat: bool) -> None:
    formatter = _formatter(
        OutputFormat.JSONLINES, details=True, tgi_compat=tgi_compat, num_top_log_probs=1
    )
    tokens = [
        Token(5, "a", -1.0, top=[Token(6, "x", -2.0)]),
        Token(7, "b", -0.5, top=[Token(8, "y", -3.0)]),
    ]
    [record] = formatter.feed(Delta(tokens, AnswerEnd.LENGTH))
    line = json.loads(record)

    assert list(line["token"].values())[:3] == [7, "ab", -1.5]
    assert [top_token["id"] for top_token in line["top_tokens"]] == [6, 8]
    assert (line["generated_text"], line["details"]["generated_tokens"]) == ("ab", 2)


def test_a_step_with_a_log_prob_that_nobody_knows_has_none() -> None:
    [record] = _formatter(OutputFormat.JSONLINES).feed(
        Delta([Token(5, "a", None), Token(7, "b", -0.5)])
    )
    assert json.loads(record)["token"]["log_prob"] is None


def test_an_event_of_tgi_counts_the_tokens_of_its_step() -> None:
    writer = TgiStream(
        tgi.parse(
            tgi.read(b'{"inputs": "a", "parameters": {"details": true}}', None, MODEL, stream=True)
        )
    )
    deltas = [
        Delta([Token(1, "a", -1.0)]),
        Delta([]),
        Delta([Token(2, "b"), Token(3, "c")]),
        Delta([], AnswerEnd.LENGTH),
    ]
    events = [
        json.loads(record.removeprefix(b"data:"))
        for delta in deltas
        for record in writer.feed(delta)
    ]

    assert [(event["index"], event["token"]["text"]) for event in events] == [
        (1, "a"),
        (3, "bc"),
        (4, ""),
    ]
    assert (events[-1]["generated_text"], events[-1]["details"]["generated_tokens"]) == ("abc", 3)


def test_a_token_without_alternatives_has_an_empty_list_where_alternatives_were_asked_for() -> None:
    formatter = _formatter(OutputFormat.JSONLINES, num_top_log_probs=2)
    [record] = formatter.feed(Delta([Token(5, "a", -1.0)]))
    assert json.loads(record)["top_tokens"] == []


@pytest.mark.parametrize("separator", SEPARATORS)
def test_a_line_separator_in_a_text_does_not_cut_a_record(separator: str) -> None:
    formatter = _formatter(OutputFormat.JSONLINES)
    [record] = formatter.feed(Delta([Token(5, f"a{separator}b", -1.0)]))

    assert len(record.decode().splitlines()) == 1
    assert json.loads(record)["token"]["text"] == f"a{separator}b"


def test_nothing_of_a_json_body_goes_out_before_the_end() -> None:
    formatter = _formatter(OutputFormat.JSON)
    assert formatter.feed(Delta([Token(5, "a", -1.0)])) == []
    assert formatter.feed(Delta([Token(6, "b", -1.0)], AnswerEnd.LENGTH)) == [
        b'{"generated_text": "ab"}'
    ]


def test_prompt_tokens_stand_in_the_details_only_when_they_were_asked_for() -> None:
    for asks_log_probs in (False, True):
        formatter = _formatter(
            OutputFormat.JSON, details=True, num_prompt_log_probs=0 if asks_log_probs else None
        )
        [body] = formatter.feed(
            Delta([Token(5, "a", -1.0)], AnswerEnd.LENGTH, prefill=[Token(1, "né", None)])
        )
        assert ("prefill" in json.loads(body)["details"]) is asks_log_probs


@pytest.mark.parametrize("output_format", OutputFormat)
@given(message=st.text(max_size=40), tgi_type=st.sampled_from([None, "generation"]))
def test_an_error_can_be_written_whatever_its_message(
    output_format: OutputFormat, message: str, tgi_type: str | None
) -> None:
    record = _formatter(output_format).error(ErrorFields(message, 424, tgi_type))
    fields = json.loads(record.decode().removeprefix("data: "))

    assert fields["error"] == message.encode(errors="replace").decode()
    assert fields["details"]["finish_reason"] == "error"
    assert list(fields)[-3:] == (
        ["error", "code", "error_type"] if tgi_type else ["details", "error", "code"]
    )
    assert (record.count(b"\n"), output_format) in (
        (0, OutputFormat.JSON),
        (1, OutputFormat.JSONLINES),
        (2, OutputFormat.SSE),
    )


@pytest.mark.parametrize("is_overtaken", [False, True])
def test_every_choice_of_a_stream_has_the_log_probs_of_its_prompt(is_overtaken: bool) -> None:
    """They come with the first choice; another choice that overtakes it does not have them."""
    body = b'{"prompt": "ab", "n": 2, "stream": true, "echo": true, "logprobs": 1, "max_tokens": 1}'
    writer = CompletionStream(
        openai.parse(openai.read(body, None, ModelConfig(path="demo", name="demo")))
    )
    prefill = [Token(1, "a"), Token(2, "b", -1.0)]
    first = Delta([Token(3, "c", -1.0)], AnswerEnd.LENGTH, prefill=prefill, prompt="ab", index=0)
    second = Delta([Token(4, "d", -1.0)], AnswerEnd.LENGTH, prompt="ab", index=1)
    early = Delta([Token(4, "e", -1.0)], prompt="ab", index=1)
    deltas = (early, first, second) if is_overtaken else (first, second)
    records = [record for delta in deltas for record in writer.feed(delta)][:2]
    log_probs_told = [
        json.loads(record.removeprefix(b"data: "))["choices"][0]["logprobs"] for record in records
    ]
    expected = [["e"], ["a", "b", "c"]] if is_overtaken else [["a", "b", "c"], ["a", "b", "d"]]

    assert [log_probs["tokens"] for log_probs in log_probs_told] == expected
    assert [log_probs["text_offset"] for log_probs in log_probs_told] == [
        [2] if is_overtaken else [0, 1, 2],
        [0, 1, 2],
    ]


@pytest.mark.parametrize(
    ("prompt", "pieces", "expected"),
    [
        ("hi 😀 x", ["hi", " ", "😀", " x"], [0, 2, 3, 4]),
        ("hi 😀 x", ["<s>", " hi", " ", "", "", "", "😀", " x"], [0, 0, 2, 3, 3, 3, 3, 4]),
        ("<s>hi", ["<s>", "<s>", "hi"], [0, 0, 3]),
        ("cut off here", [" off", " here"], [3, 7]),
        ("Hi There", ["hi", " there"], [0, 2]),
        ("a", [], []),
    ],
    ids=[
        "its own text",
        "what a tokenizer adds",
        "a special token in the text",
        "cut",
        "lower case",
        "none",
    ],
)
def test_tokens_of_a_prompt_have_their_places_in_its_text(
    prompt: str, pieces: list[str], expected: list[int]
) -> None:
    tokens = [
        Token(number, piece, is_special=piece == "<s>") for number, piece in enumerate(pieces)
    ]
    assert offsets_in(prompt, tokens) == expected
    if not prompt.startswith(("cut", "<s>")):
        assert offsets_in(prompt, tokens, is_end_cut=True) == expected


def test_tokens_of_a_prompt_whose_end_is_cut_have_the_places_of_its_beginning() -> None:
    tokens = [Token(0, "<s>", is_special=True), Token(1, " a b"), Token(2, " a")]
    assert offsets_in("a b a b a b", tokens, is_end_cut=True) == [0, 0, 3]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_cached_tokens_of_a_prompt_count_once_for_all_its_choices(is_streamed: bool) -> None:
    fields: dict[str, object] = {"prompt": ["one", "two"], "n": 2}
    if is_streamed:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}

    formatter = OPENAI_COMPLETIONS.formatter(
        openai.parse(openai.read(json.dumps(fields).encode(), "application/json", MODEL))
    )
    # The prompts are told with the first sequence of each request
    first = {0: (7, 5), 2: (9, 0)}
    records: list[bytes] = []
    for index in range(4):
        num_prompt_tokens, num_cached_tokens = first.get(index, (0, 0))
        records += formatter.feed(
            Delta(
                [Token(5, "a")],
                AnswerEnd.LENGTH,
                num_prompt_tokens=num_prompt_tokens,
                num_cached_tokens=num_cached_tokens,
                index=index,
            )
        )

    usage = json.loads(records[-2].removeprefix(b"data: ") if is_streamed else records[-1])["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]) == (16, {"cached_tokens": 5})
