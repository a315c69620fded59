"""LoRA adapters on the real engine: loading and refusal, and base and adapter requests beside each
other.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from handlers.lmi_vllm.process_setup import hide_foreign_builds
from lmi.errors import InvalidParameter, ModelUnusable, UnknownAdapter
from lmi.executor import ErrorKind, FinishReason, LoraConfig, OutputConfig, Response, SamplingConfig
from tests.handlers.vllm.asking import (
    FAMILY,
    MAX_NUM_SEQUENCES,
    PROMPT,
    TIE,
    TIMEOUT_S,
    answer,
    ask,
    finals,
    result,
    start,
    tokens,
)
from tests.handlers.vllm.small_adapters import merged, write_adapter
from tests.tiny_models import tiny_model

if TYPE_CHECKING:
    from handlers.lmi_vllm import Executor

pytestmark = pytest.mark.vllm

NAMES = ("formal", "rude")
MAX_RANK = 8
# In vLLM's memory; with more, the least used are read again from their files
MAX_LOADED = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        write_adapter(folder / name, seed)

    return folder


@pytest.fixture(scope="module")
def shared_adapted(folder: Path) -> Iterator[Executor]:
    hide_foreign_builds()
    options = {"max_lora_rank": MAX_RANK, "max_loras": 2, "max_cpu_loras": MAX_LOADED}
    with start(
        enable_lora="true", **{name: str(value) for name, value in options.items()}
    ) as executor:
        for name in NAMES:
            executor.load_adapter(name, str(folder / name))

        yield executor


@pytest.fixture
def adapted(shared_adapted: Executor) -> Executor:
    shared_adapted.await_responses(timeout_s=0)
    shared_adapted.get_latest_iteration_stats()
    return shared_adapted


def use(name: str | None) -> LoraConfig | None:
    return None if name is None else LoraConfig(name)


@pytest.mark.parametrize("name", [None, *NAMES])
def test_an_adapter_answers_as_its_weights_added_to_the_models_do(
    adapted: Executor, folder: Path, name: str | None
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model(FAMILY)).eval()
    model = model if name is None else merged(model, folder / name)
    got = result(adapted, lora_config=use(name), output_config=OutputConfig(return_log_probs=True))
    ids = got.output_token_ids[0]
    with torch.inference_mode():
        expected = (
            model(torch.tensor([[*PROMPT, *ids]]))
            .logits[0]
            .float()
            .log_softmax(-1)[len(PROMPT) - 1 : -1]
        )

    for row, token_id, log_prob in zip(expected, ids, got.log_probs[0], strict=True):  # type: ignore[index]
        assert row[token_id] >= row.max() - TIE
        assert log_prob == pytest.approx(float(row[token_id]), abs=1e-3)

    assert name is None or ids != tokens(adapted), "the adapter changes nothing"


def test_beams_with_an_adapter_are_those_of_its_weights_added_to_the_models(
    adapted: Executor, folder: Path
) -> None:
    from transformers import AutoModelForCausalLM

    from tests.beam_reference import Comparison, Found, transformers_beams

    model = merged(AutoModelForCausalLM.from_pretrained(tiny_model(FAMILY)).eval(), folder / "rude")
    sampling = SamplingConfig(3, num_return_sequences=3, length_penalty=0.0)
    output = OutputConfig(return_log_probs=True)
    request = ask(
        max_tokens=8, sampling_config=sampling, output_config=output, lora_config=use("rude")
    )
    with_adapter, base = adapted.enqueue_requests(
        [request, ask(max_tokens=8, sampling_config=sampling)]
    )
    ended = finals(adapted, [with_adapter, base])
    got = ended[with_adapter].get_result()
    comparison = Comparison()
    assert got.cum_log_probs is not None

    comparison.check(
        "rude", Found(got.output_token_ids, got.cum_log_probs), transformers_beams(model, request)
    )

    assert got.output_token_ids != ended[base].get_result().output_token_ids, (
        "the adapter changes nothing"
    )


def test_what_runs_with_an_adapter_that_is_removed_goes_on_to_its_end(
    adapted: Executor, tmp_path: Path
) -> None:
    path = str(write_adapter(tmp_path / "short-lived", seed=9))
    adapted.load_adapter("short-lived", path)
    alone = tokens(adapted, max_tokens=60, lora_config=use("short-lived"))
    request_id = adapted.enqueue_request(
        ask(max_tokens=60, lora_config=use("short-lived"), streaming=True)
    )
    pieces: list[Any] = list(adapted.await_responses(request_id, TIMEOUT_S))
    adapted.unload_adapter("short-lived")
    while not pieces[-1].is_final:
        pieces += adapted.await_responses(request_id, TIMEOUT_S)

    assert [token_id for piece in pieces for token_id in piece.result.output_token_ids[0]] == alone


# Adapters that cannot be loaded.


def without_config(path: Path) -> str:
    (path / "adapter_config.json").unlink()
    return "adapter_config.json"


def without_weights(path: Path) -> str:
    (path / "adapter_model.safetensors").unlink()
    return "vLLM cannot load this adapter: "


def with_half_its_weights(path: Path) -> str:
    weights = path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    return "vLLM cannot load this adapter: "


def with_a_config_that_is_no_json(path: Path) -> str:
    (path / "adapter_config.json").write_text("{")
    return "vLLM cannot load this adapter: "


def of_a_great_rank(path: Path) -> str:
    shutil.rmtree(path)
    write_adapter(path, seed=1, rank=2 * MAX_RANK)
    return "vLLM cannot load this adapter: .*rank"


def with_an_endless_pattern(path: Path) -> str:
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rank_pattern": {"(.*)*x": 4}}))
    return "vLLM cannot load this adapter: rank_pattern has .*, which is more than a name"


def for_another_model(path: Path) -> str:
    rewrite(path, lambda name, weight: (name.replace("q_proj", "w1"), weight))
    return "vLLM cannot load this adapter: "


def of_another_width(path: Path) -> str:
    rewrite(path, lambda name, weight: (name, weight.repeat(1, 2) if "lora_A" in name else weight))
    return "vLLM cannot load this adapter: "


def rewrite(path: Path, change: Any) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "adapter_model.safetensors")
    save_file(
        dict(change(*weight) for weight in weights.items()), path / "adapter_model.safetensors"
    )


def not_there(path: Path) -> str:
    shutil.rmtree(path)
    return "adapter_config.json"


def loaded_in_vllm(adapted: Executor) -> set[int]:
    numbers: set[int] = adapted._engine._engine.list_loras()  # type: ignore[attr-defined]
    return numbers


BROKEN = [
    not_there,
    without_config,
    without_weights,
    with_half_its_weights,
    with_a_config_that_is_no_json,
    of_a_great_rank,
    with_an_endless_pattern,
    for_another_model,
    of_another_width,
]


@pytest.mark.parametrize("spoil", BROKEN, ids=lambda spoil: spoil.__name__)
def test_an_adapter_that_cannot_be_loaded_says_why_and_harms_nobody(
    adapted: Executor, tmp_path: Path, spoil: Any
) -> None:
    path = write_adapter(tmp_path / "broken", seed=3)
    reason = spoil(path)
    before = tokens(adapted, max_tokens=60)
    loaded = loaded_in_vllm(adapted)
    running = adapted.enqueue_request(ask(max_tokens=60))
    with pytest.raises(ModelUnusable, match=f"^{path}: .*{reason}"):
        adapted.load_adapter("broken", str(path))

    with pytest.raises(UnknownAdapter):
        adapted.enqueue_request(ask(lora_config=use("broken")))

    assert loaded_in_vllm(adapted) <= loaded, "half of it is left"

    ended = finals(adapted, [running])[running].result
    assert ended is not None and ended.output_token_ids == [before]


@pytest.mark.parametrize(
    ("name", "path"), [("", "."), (5, "."), ("five", 5), ("five", ""), ("five", None)], ids=str
)
def test_a_name_or_path_that_is_none_is_refused(adapted: Executor, name: Any, path: Any) -> None:
    with pytest.raises((ModelUnusable, InvalidParameter, TypeError)):
        adapted.load_adapter(name, path)

    assert tokens(adapted, lora_config=use("rude"))


# Base and adapters beside each other.


def test_mixed_requests_each_get_what_they_get_alone(adapted: Executor) -> None:
    kinds = [None, "formal", "rude", None, "rude", "formal", None, None, "formal", None]
    requests = [
        ask(
            input_token_ids=(20 + number, *PROMPT), max_tokens=5 + 3 * number, lora_config=use(kind)
        )
        for number, kind in enumerate(kinds)
    ]
    alone = [
        finals(adapted, [request_id := adapted.enqueue_request(request)])[request_id].result
        for request in requests
    ]
    ids = adapted.enqueue_requests(requests)
    ended = finals(adapted, ids)

    assert [ended[request_id].result for request_id in ids] == alone


def test_neither_base_nor_adapter_waits_for_ever_behind_a_stream_of_the_other(
    adapted: Executor,
) -> None:
    """Requests of one kind keep coming; a request of the other kind gets its turn meanwhile."""
    for flood, adapter in ((None, "formal"), ("formal", None)):
        open_ids = adapted.enqueue_requests([ask(max_tokens=20, lora_config=use(flood))] * 2)
        awaited = adapted.enqueue_request(ask(max_tokens=2, lora_config=use(adapter)))
        num_after = 0
        while awaited is not None and num_after < 100:
            num_after += 1
            open_ids.append(adapted.enqueue_request(ask(max_tokens=20, lora_config=use(flood))))
            batch: list[Response] = adapted.await_responses(timeout_s=TIMEOUT_S)  # type: ignore[assignment]
            ended = {response.request_id for response in batch if response.is_final}
            open_ids = [open_id for open_id in open_ids if open_id not in ended]
            if awaited in ended:
                break

        finals(adapted, open_ids)
        assert num_after < 20, "it had to wait for those that came later"


def test_a_request_that_waits_its_turn_can_be_cancelled_and_lets_those_behind_it_pass(
    adapted: Executor,
) -> None:
    running = adapted.enqueue_request(ask(max_tokens=300))
    rude_id = adapted.enqueue_request(ask(lora_config=use("rude")))
    behind = adapted.enqueue_request(ask(max_tokens=3))
    adapted.cancel_request(rude_id)
    ended = finals(adapted, [running, rude_id, behind])
    assert list(ended) == [rude_id, behind, running]
    assert ended[rude_id].result.finish_reasons == [FinishReason.CANCELLED]  # type: ignore[union-attr]


# A step that raises, the only harm that a client of a loaded adapter can do to vLLM.


def test_a_step_that_raises_ends_what_ran_and_keeps_what_waited(
    adapted: Executor, tmp_path: Path
) -> None:
    """vLLM reads an adapter that left its memory again, in a step, when the files are gone."""
    lost = write_adapter(tmp_path / "lost", seed=5)
    adapted.load_adapter("lost", str(lost))
    names = [f"other-{number}" for number in range(MAX_LOADED)]
    for number, name in enumerate(names):
        adapted.load_adapter(name, str(write_adapter(tmp_path / name, seed=30 + number)))

    shutil.rmtree(lost)
    last_request = ask(max_tokens=4, lora_config=use(names[-1]))
    alone, base = (
        tokens(adapted, max_tokens=4, lora_config=lora_config)
        for lora_config in (last_request.lora_config, None)
    )

    num_running = MAX_NUM_SEQUENCES - 1
    running = [ask(max_tokens=120, streaming=True, lora_config=use(names[-1]))] * num_running
    ran = adapted.enqueue_requests(running)
    assert all(adapted.await_responses(ran, TIMEOUT_S)), "they run"

    fatal, waited, of_base = adapted.enqueue_requests(
        [ask(lora_config=use("lost")), last_request, ask(max_tokens=4)]
    )
    ended = finals(adapted, [*ran, fatal, waited, of_base])

    for lora_config in (*ran, fatal):
        assert (
            ended[lora_config].error is not None
            and ended[lora_config].error.kind is ErrorKind.GENERATION
        )  # type: ignore[union-attr]
        assert "the step failed" in ended[lora_config].error_msg

    assert ended[waited].result.output_token_ids == [alone], ended[waited].error_msg  # type: ignore[union-attr]
    assert ended[of_base].result.output_token_ids == [base], ended[of_base].error_msg  # type: ignore[union-attr]
    assert tokens(adapted, max_tokens=4) == base and adapted.can_enqueue_requests()

    for name in ("lost", *names):
        adapted.unload_adapter(name)

    assert not answer(adapted, lora_config=use("formal")).has_error()
    assert adapted.get_latest_iteration_stats()[-1].kv_cache_stats.used_num_blocks == 0
