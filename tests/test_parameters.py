"""Every parameter that LMI documents, on every engine: applied, tolerated with a line for the log,
or refused.

The lists of names are copied from LMI's page, not read from the schema, so a name that the schema
forgets fails here. A row says where a value is applied. What reaches an engine is in its Request;
`echo` then chooses no tokens by it.
"""

from __future__ import annotations

import asyncio
import enum
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from lmi.apis.lmi.api import LMI
from lmi.engine.client import Engines, Submission
from lmi.errors import GenerationFailed, LmiError
from lmi.executor import EngineInfo, Executor, Request, Response, SamplingConfig
from lmi.pipeline import Pipeline
from lmi.settings.config import ModelConfig
from lmi.settings.handler import announced
from lmi.text.tokenizer import Tokenizer
from lmi.types import Delta, Origin
from tests.apis.lmi.test_sampling_defaults import CASES as OF_THE_PAGE, GREEDY
from tests.conformance.conftest import EXECUTORS
from tests.tiny_models import tiny_model

# vLLM meets a newer xgrammar.
pytestmark = pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")

TIMEOUT_S = 60.0
NUM_TOKENS = 8

# The names of LMI's page, in its order.
EVERY_ENGINE = """
    do_sample seed temperature repetition_penalty top_k top_p max_new_tokens details
    return_full_text stop_sequences decoder_input_details
"""
OF_LMI_DIST = """
    typical_p truncate ignore_eos_token top_k min_p presence_penalty frequency_penalty n best_of
    num_beams length_penalty early_stopping stop_token_ids include_stop_str_in_output
    ignore_eos_token logprobs prompt_logprobs skip_special_tokens spaces_between_special_tokens
"""
OF_VLLM = """
    top_k min_p presence_penalty frequency_penalty n best_of num_beams length_penalty early_stopping
    stop_token_ids include_stop_str_in_output ignore_eos_token logprobs prompt_logprobs
    skip_special_tokens spaces_between_special_tokens
"""
OF_TENSORRT_LLM = """
    temperature top_k top_p min_length bad_sequences stop presence_penalty length_penalty
    frequency_penalty
"""
OF_VLLMS_SERVER = "guided_json guided_regex guided_choice guided_grammar response_format"
OF_THE_EXECUTOR_API = "no_repeat_ngram_size logits_post_processor_name"
LISTS = (EVERY_ENGINE, OF_LMI_DIST, OF_VLLM, OF_TENSORRT_LLM, OF_VLLMS_SERVER, OF_THE_EXECUTOR_API)


class Verdict(enum.Enum):
    ENGINE = "applied by the engine"
    TEXT = "applied to the text or to the form of the answer"
    IGNORED = "tolerated, with a line for the log"
    REFUSED = "refused by name"


ENGINE, TEXT, IGNORED, REFUSED = Verdict
UNREAD_IN_2025 = {
    "seed",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "no_repeat_ngram_size",
}


@dataclass(frozen=True)
class Row:
    """A value that means something, what stands `beside` it, and the verdicts of the engines."""

    name: str
    value: object
    lmi_dist: Verdict
    vllm: Verdict
    trtllm: Verdict
    echo: Verdict
    beside: dict[str, object] = field(default_factory=dict)

    def verdict(self, engine: str) -> Verdict:
        """The verdict of an engine. TensorRT-LLM has two: the older one refuses what its sampler
        would not read.
        """
        if (
            engine == "trtllm-main-2025-10"
            and self.trtllm is ENGINE
            and not UNREAD_IN_2025.isdisjoint((self.name, *self.beside))
        ):
            return REFUSED

        columns = {
            "lmi-dist": self.lmi_dist,
            "vllm": self.vllm,
            "trtllm": self.trtllm,
            "echo": self.echo,
        }
        return next(verdict for name, verdict in columns.items() if engine.startswith(name))

    def __str__(self) -> str:
        return "-".join((self.name, *self.beside))


def everywhere(name: str, value: object, verdict: Verdict, **beside: object) -> Row:
    return Row(name, value, verdict, verdict, verdict, verdict, beside)


def without_do_sample(name: str, value: object) -> Row:
    """TensorRT-LLM's list has no do_sample: its top_k and top_p decide whether an answer is
    sampled.
    """
    return Row(name, value, IGNORED, IGNORED, ENGINE, IGNORED)


SAMPLED = {"do_sample": True}
DETAILS = {"details": True}
REGEX = "[a-z]{4}"
GRAMMAR = 'root ::= "yes" | "no"'
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
ROWS = [
    everywhere("do_sample", True, ENGINE),
    everywhere("seed", 2**64 - 1, ENGINE, do_sample=True),
    everywhere("seed", 7, IGNORED),
    everywhere("temperature", 0.5, ENGINE, **SAMPLED),
    everywhere("temperature", 0.5, IGNORED),
    everywhere("repetition_penalty", 1.3, ENGINE),
    everywhere("top_k", 7, ENGINE, **SAMPLED),
    without_do_sample("top_k", 7),
    everywhere("top_p", 0.5, ENGINE, **SAMPLED),
    without_do_sample("top_p", 0.5),
    everywhere("max_new_tokens", 3, ENGINE),
    everywhere("details", True, TEXT),
    everywhere("return_full_text", True, TEXT),
    # An engine that must be stopped streams
    everywhere("stop_sequences", ["x"], ENGINE),
    everywhere("decoder_input_details", True, ENGINE, **DETAILS),
    everywhere("decoder_input_details", True, IGNORED),
    Row("typical_p", 0.5, ENGINE, REFUSED, REFUSED, ENGINE, SAMPLED),
    everywhere("typical_p", 0.5, IGNORED),
    everywhere("truncate", 2, ENGINE),
    everywhere("ignore_eos_token", True, ENGINE),
    everywhere("min_p", 0.5, ENGINE, **SAMPLED),
    everywhere("min_p", 0.5, IGNORED),
    everywhere("presence_penalty", 0.5, ENGINE),
    everywhere("frequency_penalty", 0.5, ENGINE),
    everywhere("n", 2, ENGINE, **SAMPLED),
    everywhere("best_of", 2, ENGINE, **SAMPLED),
    Row("num_beams", 2, ENGINE, ENGINE, REFUSED, REFUSED),
    Row("num_beams", 2, ENGINE, ENGINE, REFUSED, REFUSED, {"n": 2, "best_of": 2}),
    Row("repetition_penalty", 1.3, ENGINE, REFUSED, REFUSED, REFUSED, {"num_beams": 2}),
    Row("bad_sequences", ["x"], ENGINE, REFUSED, REFUSED, REFUSED, {"num_beams": 2}),
    everywhere("guided_regex", REGEX, REFUSED, num_beams=2),
    Row("do_sample", True, IGNORED, IGNORED, REFUSED, REFUSED, {"num_beams": 2}),
    Row("length_penalty", 0.5, ENGINE, ENGINE, REFUSED, REFUSED, {"num_beams": 2}),
    everywhere("length_penalty", 0.5, IGNORED),
    Row("early_stopping", True, ENGINE, ENGINE, REFUSED, REFUSED, {"num_beams": 2}),
    everywhere("early_stopping", True, IGNORED),
    everywhere("stop_token_ids", [5], ENGINE),
    Row("stop_token_ids", list(range(5, 60)), ENGINE, REFUSED, REFUSED, REFUSED, {"num_beams": 2}),
    everywhere("include_stop_str_in_output", True, TEXT, stop_sequences=["x"]),
    everywhere("logprobs", 2, ENGINE, **DETAILS),
    everywhere("logprobs", 2, IGNORED),
    everywhere("prompt_logprobs", 2, ENGINE, **DETAILS),
    everywhere("prompt_logprobs", 2, IGNORED),
    everywhere("skip_special_tokens", False, TEXT),
    everywhere("spaces_between_special_tokens", False, TEXT),
    everywhere("min_length", 5, ENGINE),
    Row("bad_sequences", ["x"], ENGINE, ENGINE, ENGINE, REFUSED),
    everywhere("stop", ["x"], ENGINE),
    everywhere("stop", True, IGNORED),
    Row("guided_json", SCHEMA, ENGINE, ENGINE, ENGINE, REFUSED),
    Row("guided_regex", REGEX, ENGINE, ENGINE, ENGINE, REFUSED),
    Row("guided_choice", ["yes", "no"], ENGINE, ENGINE, ENGINE, REFUSED),
    Row("guided_grammar", GRAMMAR, ENGINE, ENGINE, ENGINE, REFUSED),
    Row("response_format", {"type": "json_object"}, ENGINE, ENGINE, ENGINE, REFUSED),
    Row("no_repeat_ngram_size", 2, ENGINE, REFUSED, ENGINE, REFUSED),
    Row("logits_post_processor_name", "nobody", REFUSED, REFUSED, REFUSED, REFUSED),
]
ENGINES = [
    pytest.param("lmi-dist"),
    pytest.param("vllm", marks=pytest.mark.vllm),
    pytest.param("trtllm-main-2025-10"),
    pytest.param("trtllm-main-2026-08"),
    pytest.param("echo"),
]


def test_no_documented_name_is_forgotten() -> None:
    assert {row.name for row in ROWS} == {name for names in LISTS for name in names.split()}


class Stream:
    """A request on an executor in this process."""

    def __init__(self, executor: Executor, request: Request) -> None:
        self._executor = executor
        self._request = request

    async def forward(self, take: Any) -> None:
        request_id = self._executor.enqueue_request(self._request)
        is_over = False
        while not is_over:
            responses = await asyncio.to_thread(
                self._executor.await_responses, request_id, TIMEOUT_S
            )
            for response in cast(list[Response], responses):
                if response.result is None:
                    raise GenerationFailed(response.error_msg)

                if (pause := take(response.result)) is not None:
                    await pause

                is_over = response.is_final

    def close(self) -> None:
        return


class OneEngine:
    """What the pipeline needs of `Engines`. `asked` is the last Request."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.asked: Request | None = None

    async def ready(self, adapter: str | None) -> EngineInfo:
        return self._executor.info

    def encoded(self, request: Request, origin: Origin) -> Submission:
        self.asked = request
        return Engines([], []).encoded(request, origin)

    def send(
        self,
        submission: Submission,
        session: str | None = None,
        prompt_cache_key: str | None = None,
    ) -> Stream:
        assert self.asked is not None
        return Stream(self._executor, self.asked)


@dataclass(frozen=True)
class Answer:
    """`meaning` is the request and the format as the schema reads them."""

    status: int
    body: dict[str, Any]
    asked: Request | None = None
    meaning: object = None
    ignored: tuple[str, ...] = ()


class Door:
    """The LMI API in front of one engine, whose record may have defaults."""

    def __init__(self, executor: Executor) -> None:
        defaults = announced()[executor.info.name].sampling_defaults
        self._model = ModelConfig(path="tiny", name="tiny", sampling_defaults=defaults)
        self._engine = OneEngine(executor)
        tokenizer = Tokenizer.load(str(tiny_model("llama_wide")))
        self._pipeline = Pipeline(tokenizer, cast(Engines, self._engine), self._model)

    def ask(self, given: dict[str, object]) -> Answer:
        parameters = {"max_new_tokens": NUM_TOKENS} | given
        body = json.dumps({"inputs": "The quick brown", "parameters": parameters}).encode()
        message = LMI.read(body, None, self._model)
        format = message.format
        records = list[bytes]()
        try:
            parsed = LMI.parse(message)
            format = parsed.format
            formatter = LMI.formatter(parsed)

            def take(delta: Delta) -> None:
                records.extend(cast(list[bytes], formatter.feed(delta)))

            async def answer() -> None:
                prepared = await self._pipeline.prepare(parsed.requests)
                await self._pipeline.generate(prepared, take)

            asyncio.run(answer())
        except LmiError as error:
            rendered = LMI.errors.render(error, format, accepted=False)
            return Answer(rendered.status, json.loads(rendered.body))

        meaning = parsed.requests, parsed.format
        return Answer(
            200, json.loads(b"".join(records)), self._engine.asked, meaning, parsed.ignored
        )


@pytest.fixture(params=ENGINES, scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[str, Door]]:
    with EXECUTORS[request.param]() as executor:
        yield request.param, Door(executor)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_value_that_means_something_is_applied_tolerated_or_refused(
    engine: tuple[str, Door], row: Row
) -> None:
    name, door = engine
    plain = door.ask(row.beside)
    answer = door.ask(row.beside | {row.name: row.value})
    if row.verdict(name) is REFUSED:
        assert answer.status == 424 and answer.body["details"]["finish_reason"] == "error"
        assert _begins_with_one_of(answer.body["error"], (row.name, *row.beside)), answer.body
        return

    assert answer.status == 200, answer.body

    is_told = any(line.startswith(f"parameters.{row.name}: ") for line in answer.ignored)
    assert is_told == (row.verdict(name) is IGNORED)
    assert (answer.meaning != plain.meaning) == (row.verdict(name) is not IGNORED)

    if row.verdict(name) is not TEXT:
        assert (answer.asked != plain.asked) == (row.verdict(name) is ENGINE)


def _begins_with_one_of(message: str, names: tuple[str, ...]) -> bool:
    return any(message.startswith(f"parameters.{name} ") for name in names)


USUAL = [
    ({}, GREEDY),
    ({"do_sample": True}, SamplingConfig()),
    ({"do_sample": True, "top_k": 7, "temperature": 0.8}, SamplingConfig(top_k=7, temperature=0.8)),
    ({"do_sample": True, "top_k": 7, "top_p": 0}, GREEDY),
    ({"top_k": 7, "top_p": 0.5}, GREEDY),
]


def test_the_defaults_that_reach_an_engine_are_those_of_its_list(engine: tuple[str, Door]) -> None:
    name, door = engine
    for parameters, expected in OF_THE_PAGE if name.startswith("trtllm") else USUAL:
        answer = door.ask(parameters)
        assert answer.asked is not None and answer.asked.sampling_config == expected, parameters


def test_nulls_are_as_if_left_out(engine: tuple[str, Door]) -> None:
    plain = engine[1].ask({})
    answer = engine[1].ask({row.name: None for row in ROWS} | {"max_new_tokens": NUM_TOKENS})
    assert (answer.status, answer.body, answer.asked, answer.ignored) == (
        200,
        plain.body,
        plain.asked,
        (),
    )


def test_a_name_that_nobody_knows_is_tolerated_and_told(engine: tuple[str, Door]) -> None:
    answer = engine[1].ask({"frobnicate": 1})
    assert (answer.status, answer.ignored) == (200, ("parameters.'frobnicate': unknown",))
