"""Short scenes over the double, each in a forked child of one process that has loaded torch and transformers.

Standard input has one JSON object a line, a `Run`; standard output gets an `Outcome` for each. A scene returns what is
the same each time, so that a mistake in the adapter shows itself as another answer. It runs as a process:

    python -m tests.handlers.trtllm.battery
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from lmi.executor import (
    GuidedDecodingParams,
    GuideType,
    KvCacheRetentionConfig,
    OutputConfig,
    Request,
    Response,
    SamplingConfig,
    TokenRangeRetentionConfig,
)
from tests.handlers.trtllm.double import double, knobs
from tests.handlers.trtllm.mutations import Outcome, Run
from tests.tiny_models import tiny_model

TIMEOUT_S = 90.0  # of one child, which may start a guide's process on a busy machine
NUM_CHILDREN = 2  # at a time
PROMPT = (11, 12, 13, 14, 15)
GREEDY = SamplingConfig(temperature=0)
SAMPLED = SamplingConfig(temperature=0.9, seed=3)
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
NUM_SLOTS = 4


@dataclass
class Stage:
    """An executor over the double, and what its LLM was asked."""

    executor: Any
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def llm(self) -> Any:
        return self.executor._trtllm._llm

    def ask(self, **fields: Any) -> int:
        request = {"input_token_ids": PROMPT, "max_tokens": 8, "sampling_config": GREEDY, **fields}
        return int(self.executor.enqueue_request(Request(**request)))

    def responses(self, request_id: int) -> list[Response]:
        found: list[Response] = []
        while not found or not found[-1].is_final:
            found += self.executor.await_responses(request_id, TIMEOUT_S)
        return found

    def answers(self, **fields: Any) -> list[Any]:
        return [_plain(one) for one in self.responses(self.ask(**fields))]

    def answer(self, **fields: Any) -> list[Any]:
        """The sequences of a request that is streamed, each with its pieces put together, and its end."""
        results = [one.get_result() for one in self.responses(self.ask(streaming=True, **fields))]
        found: dict[int, list[Any]] = {}
        for result in results:
            tokens, log_probs, ends = found.setdefault(result.sequence_index, [[], [], []])
            tokens += result.output_token_ids[0]
            log_probs += [round(one, 4) for one in (result.log_probs or [[]])[0]]
            ends.append(result.finish_reasons[0].name) if result.is_sequence_final else None
        return [found[index] for index in sorted(found)]


def _plain(response: Response) -> Any:
    if response.error is not None:
        return [response.error.kind.name, response.error.field]
    result = response.get_result()
    sums = [round(one, 4) for one in result.cum_log_probs or ()]
    return [result.output_token_ids, [one.name for one in result.finish_reasons], sums]


@contextmanager
def stage(profile: str, *, max_beam_width: int = 1, **options: str) -> Iterator[Stage]:
    from lmi.settings.config import EngineConfig

    config = EngineConfig(
        handler="trtllm", dtype="fp32", max_num_sequences=NUM_SLOTS, max_sequence_length=512,
        max_beam_width=max_beam_width, options=options,
    )  # fmt: skip
    with double(profile) as executor_class:
        executor = executor_class(tiny_model("llama_wide"), config)
        known = Stage(executor)
        submit = known.llm.generate_async

        def noted(*args: Any, **more: Any) -> Any:
            known.calls.append(more)
            return submit(*args, **more)

        known.llm.generate_async = noted
        try:
            yield known
        finally:
            executor.shutdown()


# The scenes. Each names what a client or the engine can see.


def tokens(profile: str) -> Any:
    """Answers of one request after another, streamed and whole."""
    with stage(profile) as on:
        return [on.answer(), on.answer(max_tokens=3), on.answers(max_tokens=5), on.answers(input_token_ids=(9,))]


def log_probs(profile: str) -> Any:
    """Log-probs of each token and of the best ones, where a step brings several tokens."""
    asked = OutputConfig(return_log_probs=True, num_top_log_probs=2)
    with stage(profile) as on:
        found = on.answer(output_config=asked)
        with knobs(tokens_per_step=2):
            results = [one.get_result() for one in on.responses(on.ask(streaming=True, output_config=asked))]
        return found, [entry for one in results for entry in _top(one)]


def _top(result: Any) -> Any:
    return [[one.token_id, round(one.log_prob, 4)] for one in _flat(result.top_log_probs or ())]


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple) and not hasattr(value, "token_id"):
            yield from _flat(value)
        else:
            yield value


def end_token(profile: str) -> Any:
    """The same answer whether the engine keeps the end token or drops it."""
    with stage(profile) as on:
        [[ids, _, _]] = on.answer()
        found = []
        for kept in ("kept", "dropped"):
            with knobs(end_token=kept):
                found.append(on.answer(end_id=ids[3]))
                found.append(on.answer(stop_words=((ids[2],),)))
                found.append(on.answer(stop_words=((ids[2], ids[3]),)))
        return found


def no_end(profile: str) -> Any:
    """A request without an end token goes on behind the tokenizer's own."""
    with stage(profile) as on:
        end = on.llm._end_id
        return on.answer(embedding_bias=((end, 1000.0),)), [one["sampling_params"].end_id for one in on.calls]


def many(profile: str) -> Any:
    """Sequences of one request differ, and each has its own seed and its own parameters."""
    with stage(profile) as on:
        on.answer(sampling_config=SamplingConfig(temperature=0.9, seed=3, num_return_sequences=2))
        seeds = sorted(str(one["sampling_params"].seed) for one in on.calls)
        temperatures = [one["sampling_params"].temperature for one in on.calls]
        return len({id(one["sampling_params"]) for one in on.calls}), seeds, temperatures


def changed_logits(profile: str) -> Any:
    """A bias, a banned token and a rule change the answer."""
    with stage(profile) as on:
        [[ids, _, _]] = on.answer()
        rule = SamplingConfig(temperature=0, no_repeat_ngram_size=2) if profile == "main-2026-08" else GREEDY
        changes = ({"embedding_bias": ((77, 1000.0),)}, {"bad_words": ((ids[0],),)}, {"sampling_config": rule})
        return [on.answer(**change) for change in changes]


def keywords(profile: str) -> Any:
    """What the engine is told beside the prompt."""
    kept = KvCacheRetentionConfig(
        token_range_retention_configs=(TokenRangeRetentionConfig(0, 2, 80, 5000),), decode_duration_ms=2000
    )
    with stage(profile) as on:
        urgent = {"priority": 0.75} if on.executor.info.capabilities.priority else {}
        on.answer(cache_salt="one", kv_cache_retention_config=kept, **urgent)
        [call] = on.calls
        theirs = call["kv_cache_retention_config"]
        durations = [theirs.decode_duration_ms, theirs.token_range_retention_configs[0].duration_ms]
        plain = {name: call.get(name) for name in ("inputs", "streaming", "cache_salt", "priority")}
        return sorted(call), plain, [one.total_seconds() for one in durations]


def cancelled(profile: str) -> Any:
    """Cancelled requests leave their places to the next one."""
    with stage(profile) as on, knobs(step_s=0.01):
        engine = on.llm._engine
        held = [on.ask(max_tokens=450, streaming=True) for _ in range(NUM_SLOTS)]
        for one in held:
            on.executor.await_responses(one, TIMEOUT_S)
            on.executor.cancel_request(one)
        before = engine._num_steps
        found = on.answer(max_tokens=2)
        return found, engine._num_steps - before < 300


def refused(profile: str) -> Any:
    """A request that the engine refuses ends by itself and at once, and those around it go on."""
    with stage(profile) as on:
        check = on.llm._check

        def strict(prompt: list[int], params: Any) -> None:
            if params.max_tokens == 13:
                raise ValueError("thirteen")
            check(prompt, params)

        on.llm._check = strict
        before, wrong = on.ask(max_tokens=60), on.ask(max_tokens=13)
        after = on.answer(max_tokens=3)
        num_ready = on.executor.get_num_responses_ready(wrong)
        return (
            [_plain(one) for one in on.responses(before)],
            after,
            num_ready,
            num_ready and on.responses(wrong)[0].error,
        )


def wrong_structure(profile: str) -> Any:
    """A structure that is wrong never reaches the engine."""
    wrong = GuidedDecodingParams(GuideType.JSON_SCHEMA, '{"type": "no such type"}')
    right = GuidedDecodingParams(GuideType.JSON_SCHEMA, SCHEMA)
    with stage(profile) as on:
        found = on.answers(guided_decoding_params=wrong)
        num_submitted = len(on.calls)
        on.answers(guided_decoding_params=right, max_tokens=60)
        return found, num_submitted, on.llm._engine._num_failed


def beams(profile: str) -> Any:
    """Each step restates whole beams."""
    with stage(profile, max_beam_width=2) as on:
        asked = {"sampling_config": SamplingConfig(2), "output_config": OutputConfig(return_log_probs=True)}
        [found] = on.answers(**asked)
        [best, *_] = found[0]
        ended = on.answers(end_id=best[3], max_tokens=4, sampling_config=SamplingConfig(2))
        return found, on.answers(streaming=True, max_tokens=4, **asked)[-1], ended


def prompt_log_probs(profile: str) -> Any:
    """The log-probs of the prompt are those of its own tokens."""
    with stage(profile) as on:
        [one] = on.responses(on.ask(output_config=OutputConfig(num_prompt_log_probs=0)))
        return [round(each.log_prob or 0.0, 4) for each in _flat(one.get_result().prompt_log_probs or ())]


def death(profile: str) -> Any:
    """An engine that cannot go on ends its requests as lost, not as wrong."""
    with stage(profile) as on:
        held = on.ask(max_tokens=450)
        with knobs(dies="a worker ended"):
            return [_plain(one) for one in on.responses(held)]


def shut_down(profile: str) -> Any:
    """The end of the executor is the end of its engine."""
    with stage(profile) as on:
        llm = on.llm
        on.answer()
    return llm._engine is None


Scene: TypeAlias = Callable[[str], Any]
SCENES: dict[str, Scene] = {
    one.__name__: one
    for one in (
        tokens, log_probs, end_token, no_end, many, changed_logits, keywords, cancelled, refused, wrong_structure,
        beams, prompt_log_probs, death, shut_down,
    )
}  # fmt: skip


# The processes.


def main() -> None:
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    tiny_model("llama_wide")
    with double("main-2026-08"):
        pass  # so that children find loaded what the adapter imports
    runs = [msgspec.json.decode(line, type=Run) for line in sys.stdin.buffer]
    children: dict[int, tuple[Run, int]] = {}
    while runs or children:
        while runs and len(children) < NUM_CHILDREN:
            run = runs.pop(0)
            pid, fd = _forked(run)
            children[pid] = (run, fd)
        pid, status = os.wait()
        run, fd = children.pop(pid)
        with os.fdopen(fd, "rb") as pipe:
            answer = pipe.read()
        ended = f"the child ended with {os.waitstatus_to_exitcode(status)}"
        outcome = Outcome(run.name, msgspec.json.decode(answer) if answer else ended)
        print(msgspec.json.encode(outcome).decode(), flush=True)


def _forked(run: Run) -> tuple[int, int]:
    """The pid of a child that runs a scene, and the end of the pipe that gets its answer."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_fd)
        return pid, read_fd
    os.close(read_fd)
    signal.alarm(int(TIMEOUT_S))
    os.write(write_fd, msgspec.json.encode(_answer(run)))  # less than a pipe holds
    os._exit(0)


def _answer(run: Run) -> Any:
    import handlers

    if run.folder:
        handlers.__path__.insert(0, run.folder)
    try:
        return SCENES[run.scene](run.profile)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
