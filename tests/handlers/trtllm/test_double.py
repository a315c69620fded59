"""The double refuses what the facts refuse, and shows each behaviour that double/README.md lists."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.handlers.trtllm.double import encoded, knobs, loaded, write_double
from tests.handlers.trtllm.double.knobs import VARIABLE
from tests.handlers.trtllm.facts import PROFILES, load
from tests.handlers.vllm.small_adapters import write_adapter
from tests.tiny_models import END_ID, tiny_model

WAIT_S = 30.0
PROMPT = [11, 12, 13]
MODEL = str(tiny_model("llama_wide"))
README = Path(__file__).with_name("double") / "README.md"


class Lab:
    """A loaded double, and the engines that a test has made of it."""

    def __init__(self, profile: str) -> None:
        import tensorrt_llm
        import tensorrt_llm.llmapi

        self.profile, self.api, self.llmapi = profile, tensorrt_llm, tensorrt_llm.llmapi
        self.engines: list[Any] = []

    def llm(self, **arguments: Any) -> Any:
        self.engines.append(self.api.LLM(**{"model": MODEL, "max_batch_size": 4, "max_seq_len": 256} | arguments))
        return self.engines[-1]

    def params(self, **given: Any) -> Any:
        return self.api.SamplingParams(**{"max_tokens": 8, "end_id": -1} | given)

    def ask(self, llm: Any, prompt: list[int] = PROMPT, more: dict[str, Any] | None = None, **given: Any) -> Any:
        inputs = {"prompt_token_ids": prompt}
        return llm.generate_async(inputs=inputs, sampling_params=self.params(**given), **more or {})

    def tokens(self, llm: Any, **given: Any) -> list[int]:
        ids: list[int] = self.ask(llm, **given).result().outputs[0].token_ids
        return ids


@pytest.fixture(params=PROFILES)
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    with loaded(request.param):
        lab = Lab(request.param)
        yield lab
        for llm in lab.engines:
            llm.shutdown()


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def greedy(prefix: list[int], token: int) -> list[int]:
    return prefix[: prefix.index(token) + 1]


# What the facts refuse.


def test_an_unknown_keyword_is_refused_everywhere_as_upstream(lab: Lab) -> None:
    with pytest.raises(ValueError, match="invalid argument: max_batchsize"):
        lab.llm(max_batchsize=4)
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        lab.llmapi.KvCacheConfig(max_token=4)
    with pytest.raises(ValueError, match="max_batch_size"):
        lab.llm(max_batch_size="many")
    for call in (lambda: lab.params(top_kk=1), lambda: lab.ask(lab.llm(), more={"stream": True})):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            call()
    with pytest.raises(TypeError, match="too many positional"):
        lab.api.SamplingParams(8)


def test_an_attribute_that_the_facts_lack_does_not_exist(lab: Lab) -> None:
    output = lab.ask(lab.llm()).result()
    assert not hasattr(output.outputs[0], "tokens") and not hasattr(output, "text")
    with pytest.raises(AttributeError):
        lab.params().max_new_tokens = 5
    facts = load(lab.profile)
    for name, instance in (("RequestOutput", output), ("CompletionOutput", output.outputs[0])):
        known = facts.cls(f"tensorrt_llm.llmapi.{name}").names
        assert {one for one in dir(instance) if one[0] != "_"} <= known
    with pytest.raises(RuntimeError, match="users do not make one"):
        lab.llmapi.RequestOutput()


def test_wrong_types_and_values_are_refused_at_the_submit(lab: Lab) -> None:
    llm = lab.llm()
    for wrong in (7, {"text": "?"}):
        with pytest.raises(TypeError, match="must be type str or list of int"):
            llm.generate_async(inputs=wrong, sampling_params=lab.params())
    with pytest.raises(TypeError, match="must be type SamplingParams"):
        llm.generate_async(inputs=PROMPT, sampling_params={"max_tokens": 3})
    for given in ({"top_p": 2.0}, {"top_k": -1}, {"temperature": -1.0}, {"n": 3, "best_of": 2}, {"n": 2}):
        with pytest.raises(ValueError, match="top_p|top_k|temperature|best_of"):
            lab.params(**given)
    with pytest.raises(ValueError, match="Only one guide"):
        lab.params(guided_decoding=lab.llmapi.GuidedDecodingParams(regex="a", json_object=True))


def test_the_models_of_arguments_are_readable_text(tmp_path: Path) -> None:
    for profile in PROFILES:
        folder = write_double(tmp_path / profile, profile)
        text = (folder / "tensorrt_llm" / "llmapi" / "llm_args.py").read_text()
        arguments = text.partition("class TorchLlmArgs(")[2]
        names = set(re.findall(r"^    (\w+):", arguments.partition("\n\n\nclass ")[0], re.MULTILINE))
        assert names == load(profile).cls("tensorrt_llm.llmapi.TorchLlmArgs").keywords


def test_two_doubles_may_be_open_and_nothing_of_them_stays() -> None:
    for later_is_closed_first in (True, False):
        contexts = [loaded("main-2025-10"), loaded("main-2026-08")]
        folders = [str(context.__enter__()) for context in contexts]
        assert sys.modules.get("tensorrt_llm") is None
        import tensorrt_llm

        assert str(tensorrt_llm.__file__).startswith(folders[1])
        for context in reversed(contexts) if later_is_closed_first else contexts:
            context.__exit__(None, None, None)
        assert "tensorrt_llm" not in sys.modules and not {*folders} & {*sys.path}


# The behaviours, in the order of double/README.md.


def test_one_object_is_returned_at_once_and_changes_with_each_step(lab: Lab) -> None:
    llm = lab.llm()
    with knobs(hangs=True):
        output = lab.ask(llm, max_tokens=5, more={"streaming": True})
        assert not output.finished and output.outputs[0].token_ids == []
    whole: list[int] = []
    for step in output:
        assert step is output
        whole += step.outputs[0].token_ids_diff
        assert step.outputs[0].token_ids == whole and step.outputs[0].length == len(whole)
    assert whole == lab.tokens(llm, max_tokens=5) and output.finished
    assert output.outputs[0].finish_reason == "length"


def test_a_request_that_was_made_without_a_loop_cannot_be_awaited(lab: Lab) -> None:
    llm = lab.llm()
    early = lab.ask(llm)

    async def wait() -> list[int]:
        with pytest.raises(AssertionError, match="event loop was not present"):
            await early
        ids: list[int] = (await lab.ask(llm)).outputs[0].token_ids
        return ids

    assert asyncio.run(wait()) == early.result().outputs[0].token_ids


def test_a_step_brings_as_many_tokens_as_the_engine_makes(lab: Lab) -> None:
    def sizes(llm: Any) -> list[int]:
        return [len(step.outputs[0].token_ids_diff) for step in lab.ask(llm, more={"streaming": True})]

    assert sizes(lab.llm()) == [1] * 8
    assert sizes(lab.llm(stream_interval=3)) == [1, 2, 3, 2]
    with knobs(tokens_per_step=3):
        assert sizes(lab.llm()) == [3, 3, 2]


def test_sequences_end_apart_and_only_the_last_one_says_why(lab: Lab) -> None:
    sampler = {"sampler_type": "TRTLLMSampler"} if lab.profile == "main-2025-10" else {}
    llm = lab.llm(**sampler)
    free = lab.ask(llm, n=2, temperature=1.0, seed=5, max_tokens=12).result().outputs
    assert free[0].token_ids != free[1].token_ids, "child i has seed + i"
    end = next(one for one in free[0].token_ids if one not in free[1].token_ids)
    output = lab.ask(llm, n=2, temperature=1.0, seed=5, max_tokens=12, end_id=end, more={"streaming": True})
    moved = [[len(one.token_ids_diff) for one in step.outputs] for step in output]
    early, late = output.outputs
    assert (early.finish_reason, late.finish_reason) == (None, "length")
    assert early.token_ids == greedy(free[0].token_ids, end) and late.token_ids == free[1].token_ids
    assert len(moved) == len(early.token_ids) + len(late.token_ids), "a step moves one of them"


def test_the_best_sequences_are_sorted_and_numbered_anew(lab: Lab) -> None:
    output = lab.ask(lab.llm(), n=2, best_of=4, temperature=1.0, logprobs=1).result()
    sums = [one.cumulative_logprob for one in output.outputs]
    assert len(sums) == 2 and sums == sorted(sums, reverse=True)
    assert [one.index for one in output.outputs] == [0, 1]


def test_beams_are_restated_and_have_the_engines_width(lab: Lab) -> None:
    llm = lab.llm(max_beam_width=3)
    search = {"use_beam_search": True, "best_of": 3, "n": 2}
    output = lab.ask(llm, **search, more={"streaming": True}, logprobs=1 if lab.profile == "main-2025-10" else 0)
    steps = [[list(one.token_ids) for one in step.outputs] for step in output]
    assert any(
        token not in known for one in output.outputs for token, known in zip(one.token_ids, one.logprobs, strict=True)
    ), "log-probs are appended, so after a reorder they are of other tokens"
    assert [len(step[0]) for step in steps] == list(range(1, 9)) and all(len(step) == 2 for step in steps)
    first, second = output.outputs
    assert first.cumulative_logprob > second.cumulative_logprob and len(first.logprobs) == 8
    assert any(later[0][: len(step[0])] != step[0] for step, later in zip(steps, steps[1:], strict=False)), "replaced"
    for given in ({}, search | {"best_of": 2}):
        with pytest.raises(lab.llmapi.RequestError, match="is not equal to max_beam_width 3"):
            lab.tokens(llm, **given)


def test_log_probs_come_in_every_form(lab: Lab) -> None:
    llm = lab.llm()
    output = lab.ask(llm, logprobs=2, more={"streaming": True})
    lengths = [(len(step.outputs[0].logprobs), len(step.outputs[0].logprobs_diff)) for step in output]
    assert lengths == [(num, 1) for num in range(1, 9)]
    completion = output.outputs[0]
    for token, known in zip(completion.token_ids, completion.logprobs, strict=True):
        assert len(known) == 2 and known[token].rank == 1 and known[token].logprob < 0
    with knobs(chosen_log_prob="missing"):
        rare = lab.ask(llm, logprobs=1, embedding_bias=_bias(7)).result().outputs[0]
        assert not any(7 in known for known in rare.logprobs)
    zero = lab.ask(llm, logprobs=0).result().outputs[0].logprobs
    if lab.profile == "main-2025-10":
        assert zero == [], "0 asks for nothing"
    else:
        assert [len(known) for known in zero] == [1] * 8
    with knobs(log_prob_form="floats"):
        floats = lab.ask(llm, logprobs=2).result().outputs[0].logprobs
    chosen = [known[token].logprob for token, known in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert floats == chosen


def _bias(token: int) -> list[float]:
    return [1000.0 if one == token else 0.0 for one in range(320)]


def test_the_end_token_is_kept_or_dropped(lab: Lab) -> None:
    llm = lab.llm()
    whole = lab.tokens(llm)
    for place, num, num_log_probs in (("kept", 3, 3), ("dropped", 2, 3), ("dropped whole", 2, 2)):
        with knobs(end_token=place):
            output = lab.ask(llm, end_id=whole[2], logprobs=1).result().outputs[0]
        assert (output.token_ids, output.finish_reason, output.stop_reason) == (whole[:num], "stop", None)
        assert len(output.logprobs) == num_log_probs


def test_stop_tokens_are_cut_off_unless_they_are_included(lab: Lab) -> None:
    llm = lab.llm()
    whole = lab.tokens(llm)
    for is_included, num in ((False, 2), (True, 3)):
        given = {"stop_token_ids": [whole[2]], "include_stop_str_in_output": is_included, "logprobs": 1}
        output = lab.ask(llm, **given).result().outputs[0]
        assert (output.token_ids, output.finish_reason, output.stop_reason) == (whole[:num], "stop", whole[2])
        assert len(output.logprobs) == 3, "log-probs are not cut"
    with pytest.raises(lab.llmapi.RequestError, match="not processed by a tokenizer"):
        lab.tokens(llm, stop=["x"])
    text = lab.ask(llm, end_id=None).result().outputs[0].text
    cut = lab.ask(llm, end_id=None, stop=text[2:4]).result().outputs[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (text[: text.index(text[2:4])], "stop", text[2:4])


def test_ignore_eos_ignores_stop_tokens_too(lab: Lab) -> None:
    llm = lab.llm()
    whole = lab.tokens(llm)
    assert lab.tokens(llm, end_id=whole[1], stop_token_ids=[whole[2]], ignore_eos=True) == whole


def test_more_tokens_than_there_is_room_for_are_cut(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    llm = lab.llm(max_seq_len=16)
    with caplog.at_level(logging.WARNING, "tensorrt_llm"):
        output = lab.ask(llm, max_tokens=500).result().outputs[0]
    assert (output.length, output.finish_reason) == (13, "length") and "max_tokens (500) is cut to 13" in caplog.text
    assert len(lab.tokens(llm, max_tokens=None)) == 13
    for prompt in ([], [11] * 16):
        with pytest.raises(lab.llmapi.RequestError, match="empty|no room"):
            lab.ask(llm, prompt).result()


def test_a_refused_request_raises_at_the_submit_or_in_its_iterator_and_then_waits(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = lab.llm()
    for given in ({"max_tokens": 0}, {"seed": -1}, {"repetition_penalty": 0.0}, {"embedding_bias": [0.0]}):
        with pytest.raises(lab.llmapi.RequestError):
            lab.tokens(llm, **given)
    output = lab.ask(llm, [1, 320])
    with pytest.raises(lab.llmapi.RequestError, match="Token ID out of range"):
        next(output)
    assert not output.finished
    waiting = threading.Thread(target=output.result, daemon=True)
    waiting.start()
    assert lab.tokens(llm), "others are served"
    assert waiting.is_alive()
    monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
    with pytest.raises(lab.llmapi.RequestError, match="Token ID out of range"):
        lab.ask(llm, [1, 320])
    output._channel.news.put(_end())
    waiting.join(WAIT_S)


def _end() -> Any:
    from tests.handlers.trtllm.double.responses import Finish, Response

    return Response(0, [[]], [Finish.CANCELLED], is_final=True)


def test_a_prompt_that_is_too_long_raises_what_its_line_raises(lab: Lab) -> None:
    kind = ValueError if lab.profile == "main-2025-10" else lab.llmapi.RequestError
    with pytest.raises(kind, match=r"should not exceed max_num_tokens \(4\)"):
        lab.ask(lab.llm(max_num_tokens=4), [11] * 5)
    assert lab.ask(lab.llm(max_num_tokens=4, enable_chunked_prefill=True), [11] * 5).result().finished


def test_an_abort_ends_soon_late_or_never(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    llm = lab.llm()

    def aborted(**turned: Any) -> Any:
        with knobs(step_s=0.2, **turned):
            output = lab.ask(llm, max_tokens=200, more={"streaming": True})
            next(output)
            output.abort()
            assert output.aborted()
        with knobs(step_s=0.001, **turned):
            if turned.get("finish_after_abort") == "never":
                until(lambda: not llm._engine._active)
            else:
                output.result()
        return output

    soon, late, never = (aborted(finish_after_abort=one) for one in ("next step", "late", "never"))
    assert soon.outputs[0].finish_reason == late.outputs[0].finish_reason == "cancelled"
    assert soon.outputs[0].length < 50 <= late.outputs[0].length < 200
    while not never._channel.news.empty():
        next(never)
    assert not never.finished and never.outputs[0].finish_reason is None
    with caplog.at_level(logging.WARNING, "tensorrt_llm"):
        soon.abort()
    assert "has ended and cannot be aborted" in caplog.text


def test_a_dead_engine_fails_what_is_open_and_what_comes(lab: Lab) -> None:
    for turned in ({"dies": "out of luck"}, {"dies_after_steps": 5}):
        llm = lab.llm()
        with knobs(step_s=0.2):
            output = lab.ask(llm, max_tokens=200, more={"streaming": True})
            next(output)
        with knobs(**turned), pytest.raises(RuntimeError, match="out of luck|a worker process ended") as found:
            output.result()
        assert not isinstance(found.value, lab.llmapi.RequestError)
        with pytest.raises(RuntimeError, match="shutting down"):
            lab.ask(llm)


def test_an_engine_whose_worker_has_ended_is_silent(lab: Lab) -> None:
    with knobs(has_workers=True):
        llm = lab.llm()
        [worker] = llm._engine._workers
        assert b"mpi4py" in Path(f"/proc/{worker.pid}/cmdline").read_bytes() and lab.tokens(llm)
        worker.kill()
        worker.wait(WAIT_S)
        output = lab.ask(llm)
        assert output._channel.news.empty() and llm._engine.error is None
    with knobs(hangs=True):
        other = lab.llm()
        waiting = lab.ask(other)
    assert waiting.result().finished, "it goes on where it was"


def test_nothing_is_taken_after_shutdown(lab: Lab) -> None:
    with lab.llm() as llm:
        assert lab.tokens(llm)
    llm.shutdown()
    for call in (lambda: lab.ask(llm), llm.get_stats):
        with pytest.raises(RuntimeError, match="shutting down"):
            call()


def test_a_timeout_is_ignored_or_raised(lab: Lab) -> None:
    with knobs(step_s=0.01 if lab.profile == "main-2025-10" else 0.2):
        output = lab.ask(lab.llm(), max_tokens=60)
        if lab.profile == "main-2025-10":
            assert output.result(timeout=0.01).outputs[0].length == 60
        else:
            with pytest.raises(TimeoutError):
                output.result(timeout=0.01)
            output.abort()


def test_statistics_are_empty_until_they_are_enabled_and_used(lab: Lab) -> None:
    silent, llm = lab.llm(), lab.llm(enable_iter_perf_stats=True)
    lab.tokens(silent)
    assert silent.get_stats(timeout=0.1) == llm.get_stats(timeout=0.1) == []
    lab.tokens(llm)
    until(lambda: len(llm._engine.stats) == 8)
    first, *_, last = llm.get_stats(timeout=0.1)
    assert first["inflightBatchingStats"]["numContextRequests"] == 1 and first["numActiveRequests"] == 1
    assert last["numActiveRequests"] == 0 and last["numCompletedRequests"] == 1 and last["iter"] == first["iter"] + 7
    assert last["kvCacheStats"]["freeNumBlocks"] == last["kvCacheStats"]["maxNumBlocks"]

    async def read() -> list[dict[str, Any]]:
        with knobs(missing_stats=("kvCacheStats",)):
            await lab.ask(llm)
            return [one async for one in llm.get_stats_async(timeout=0.1)]

    assert len(found := asyncio.run(read())) == 8 and "kvCacheStats" not in found[0]


def test_a_submit_fills_in_parameters(lab: Lab) -> None:
    llm, params = lab.llm(stream_interval=2), lab.api.SamplingParams(stop="The")
    assert (params.end_id, params.pad_id, params.best_of) == (None, None, 1)
    llm.generate_async(inputs=PROMPT, sampling_params=params).result()
    assert (params.end_id, params.pad_id, params._stream_interval) == (END_ID, END_ID, 2)
    with pytest.raises(ValueError, match="tokenizer is required"):
        lab.ask(lab.llm(skip_tokenizer_init=True), end_id=None)


def test_adapters_are_checked_where_upstream_checks_them(lab: Lab, tmp_path: Path) -> None:
    request = lab.llmapi.LoRARequest
    for path in ({}, {"lora_path": str(tmp_path / "gone")}):
        with pytest.raises(ValueError, match="does not exist"):
            request("poems", 1, **path)
    llm = lab.llm(enable_lora=True, lora_config={"max_lora_rank": 8})
    paths = [write_adapter(tmp_path / f"{rank}", seed=1, rank=rank) for rank in (4, 16)]
    poems = request("poems", 1, str(paths[0]))
    assert lab.ask(llm, more={"lora_request": poems}).result().outputs[0].token_ids != lab.tokens(llm)
    (paths[0] / "adapter_model.safetensors").write_text("{")
    assert lab.ask(llm, more={"lora_request": poems}).result().finished, "its number was read before"
    for number, path in ((2, paths[0]), (3, paths[1])):
        with pytest.raises(lab.llmapi.RequestError, match="header|rank 16"):
            lab.ask(llm, more={"lora_request": request("other", number, str(path))}).result()
    with pytest.raises(lab.llmapi.RequestError, match="LoRA is not enabled"):
        lab.ask(lab.llm(), more={"lora_request": poems}).result()


def test_a_guide_without_a_backend_is_ignored_or_refused(lab: Lab) -> None:
    guide, bare = lab.llmapi.GuidedDecodingParams, lab.llm()

    def guided(llm: Any, **structure: Any) -> Any:
        return lab.ask(llm, max_tokens=40, end_id=END_ID, guided_decoding=guide(**structure)).result().outputs[0]

    with knobs(guides_without_backend="ignored"):
        assert guided(bare, regex="a{3}").token_ids == lab.tokens(bare, max_tokens=40, end_id=END_ID)
    with knobs(guides_without_backend="refused"), pytest.raises(lab.llmapi.RequestError, match="not enabled"):
        guided(bare, regex="a{3}")
    llm = lab.llm(guided_decoding_backend="xgrammar")
    assert guided(llm, regex="a{3}").text == "aaa" and guided(llm, json={"enum": ["x"]}).text == '"x"'
    for wrong in ({"json": "{"}, {"grammar": "root ::= ("}):
        with pytest.raises(lab.llmapi.RequestError):
            guided(llm, **wrong)
    assert lab.tokens(llm), "others are served"


def test_a_burst_of_refused_requests_ends_the_engine(lab: Lab) -> None:
    llm = lab.llm()
    with knobs(error_budget=2):
        for _ in range(2):
            with pytest.raises(lab.llmapi.RequestError):
                lab.tokens(llm, max_tokens=0)
        assert lab.tokens(llm)
        with pytest.raises(RuntimeError):
            lab.tokens(llm, max_tokens=0)
        until(lambda: llm._engine.error is not None)
    with pytest.raises(RuntimeError, match="shutting down"):
        lab.ask(llm)


def test_a_start_is_slow_or_fails(lab: Lab, tmp_path: Path) -> None:
    with knobs(start_s=0.2):
        started = time.monotonic()
        lab.llm()
        assert time.monotonic() - started >= 0.2
    with knobs(start_error="CUDA out of memory"), pytest.raises(RuntimeError, match="CUDA out of memory"):
        lab.llm()
    with knobs(num_gpus=1), pytest.raises(RuntimeError, match="Only 1 GPUs are available, but 2 are required"):
        lab.llm(tensor_parallel_size=2)
    (tmp_path / "config.json").write_text('{"architectures": ["OddForCausalLM"], "vocab_size": 9}')
    with pytest.raises(ValueError, match="Unknown architecture .*: OddForCausalLM"):
        lab.llm(model=str(tmp_path))


def test_the_package_or_a_library_of_it_may_be_missing(tmp_path: Path) -> None:
    folder = write_double(tmp_path, "main-2026-08")
    imported = "import tensorrt_llm"
    found = "from importlib.metadata import version; print(version('tensorrt_llm'))"

    def said(environ: dict[str, str], program: str = imported) -> str:
        done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60)
        return done.stdout.strip() or done.stderr.splitlines()[-1]

    assert said({}).startswith("ModuleNotFoundError: No module named 'tensorrt_llm'")
    assert said({"PYTHONPATH": str(folder)}, found).startswith("1.")
    broken = {"PYTHONPATH": str(folder), VARIABLE: encoded(missing_library="libnvinfer.so.10")}
    assert said(broken).startswith("ImportError: libnvinfer.so.10: cannot open shared object file")


def test_each_line_takes_its_own_arguments(lab: Lab) -> None:
    llm = lab.llm()
    assert lab.ask(llm, more={"cache_salt": "a"}).result().finished
    for name, value in (("priority", 0.9), ("trace_headers", {})):
        if lab.profile == "main-2025-10":
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
                lab.ask(llm, more={name: value})
        else:
            assert lab.ask(llm, more={name: value}).result().finished


# Beyond the list.


def test_the_samplers_of_the_old_line_differ(lab: Lab) -> None:
    sampled = {"temperature": 1.0, "seed": 3}
    if lab.profile == "main-2026-08":
        with pytest.raises(ValueError, match="sampler_type"):
            lab.llm(sampler_type="TRTLLMSampler")
        llm = lab.llm()
    else:
        torch = lab.llm()
        assert lab.tokens(torch, **sampled) != lab.tokens(torch, **sampled), "it ignores seeds"
        assert lab.tokens(torch, repetition_penalty=50.0) == lab.tokens(torch)
        llm = lab.llm(sampler_type="TRTLLMSampler")
        assert all(len(one) == 1 for one in lab.ask(llm, logprobs=3).result().outputs[0].logprobs)
    assert lab.tokens(llm, **sampled) == lab.tokens(llm, **sampled) != lab.tokens(llm)
    whole = lab.tokens(llm, max_tokens=60)
    for rule in ({"repetition_penalty": 50.0}, {"presence_penalty": 50.0}, {"no_repeat_ngram_size": 1}):
        ids = lab.tokens(llm, max_tokens=60, **rule)
        assert len(set(ids)) == 60 > len(set(whole)), rule
    assert whole[0] not in lab.tokens(llm, max_tokens=60, bad_token_ids=[whole[0]])
    for tight in ({"min_p": 1.0}, {"top_k": 1}, {"top_p": 0.001}):
        assert lab.tokens(llm, **sampled | tight) == lab.tokens(llm)
    assert len(lab.tokens(llm, end_id=whole[0], min_tokens=4)) > 4


class Seen:
    """A logits processor that writes what it gets into a file. It is pickled, so it could not tell otherwise."""

    def __init__(self, path: str, fault: str = "") -> None:
        self.path, self.fault = path, fault

    def __call__(self, req_id: int, logits: Any, token_ids: list[list[int]], stream_ptr: Any, client_id: Any) -> None:
        if self.fault:
            raise RuntimeError(self.fault)
        with open(self.path, "a") as file:
            print(len(token_ids[0]), *logits.shape, stream_ptr, file=file)
        logits[..., 7] = 1000.0


def test_a_processor_that_raises_fails_every_active_request(lab: Lab) -> None:
    llm = lab.llm()
    with knobs(step_s=0.005):
        neighbour = lab.ask(llm, max_tokens=200, more={"streaming": True})
        next(neighbour)
        wrong = lab.ask(llm, logits_processor=Seen("", "its own fault"))
        for output in (wrong, neighbour):
            with pytest.raises(lab.llmapi.RequestError, match="its own fault"):
                output.result()
    assert lab.tokens(llm), "the engine lives on"
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        lab.ask(llm, logits_processor=lambda *arguments: None)


def test_a_processor_sees_the_last_token_only_without_the_overlap_scheduler(lab: Lab, tmp_path: Path) -> None:
    for is_off, lengths in ((False, [3, 3, 4]), (True, [3, 4, 5])):
        path = tmp_path / f"{is_off}"
        llm = lab.llm(disable_overlap_scheduler=is_off)
        output = lab.ask(llm, max_tokens=3, logits_processor=[Seen(str(path))], logprobs=1).result().outputs[0]
        assert path.read_text().splitlines() == [f"{length} 1 1 320 None" for length in lengths]
        assert output.token_ids == [7, 7, 7]
        assert [one[7].logprob for one in output.logprobs] == [0.0] * 3, "log-probs are read after it"


def test_a_reused_prefix_has_no_rows(lab: Lab) -> None:
    llm = lab.llm()
    asked = {
        "return_context_logits": True,
        "return_generation_logits": True,
        "additional_model_outputs": ["hidden_states"],
    }
    first, again, other = (lab.ask(llm, more={"cache_salt": salt}, **asked).result() for salt in ("a", "a", "b"))
    assert (first.cached_tokens, again.cached_tokens, other.cached_tokens) == (0, 2, 0)
    assert [one.context_logits.shape for one in (first, again, other)] == [(3, 320), (1, 320), (3, 320)]
    completion = first.outputs[0]
    assert completion.generation_logits.argmax(-1).tolist() == completion.token_ids
    assert completion.additional_context_outputs["hidden_states"].shape[0] == 3
    assert completion.additional_generation_outputs["hidden_states"].shape[:2] == (8, 1)
    whole = lab.llm(kv_cache_config=lab.llmapi.KvCacheConfig(enable_block_reuse=False))
    assert [lab.ask(whole, **asked).result().cached_tokens for _ in range(2)] == [0, 0]


def test_an_odd_name_of_an_output_fails_the_step(lab: Lab) -> None:
    with pytest.raises(lab.llmapi.RequestError, match="nowhere"):
        lab.ask(lab.llm(), additional_model_outputs=["nowhere"]).result()


def test_every_behaviour_of_the_list_has_a_test() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\|(.*)\|$", README.read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 26))
    named = [name for _, cell in rows for name in re.findall(r"test_\w+", cell)]
    assert {*re.findall(r"test_\w+", README.read_text())} - {"test_double", "test_habits"} <= globals().keys() and len(
        named
    ) >= 25
