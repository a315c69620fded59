"""Answers of a whole server with a real model, compared with transformers on the same
checkpoint.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx2
import pytest
from huggingface_hub import InferenceClient

from handlers.lmi_dist.cached_blocks import TOKENS_PER_PART
from tests.machine import MAX_TRIES
from tests.served import Server
from tests.system.container import Answer, wait_until
from tests.tiny_models import tiny_model

NUM_TOKENS = 24
FORMATS = ("json", "jsonlines", "sse")
PROMPTS = ("The quick", "a", "She sells sea shells by the sea shore. " * 12, "Straße 狐\n\t")
# Two logits this close count as equal in the reference
TIE = 1e-4
TOLERANCE = 1e-3  # of a log-prob


@dataclass(frozen=True)
class Reference:
    """Greedy decoding by transformers. `tie_at`: the first position where two tokens were equally
    likely.
    """

    ids: list[int]
    log_probs: list[float]
    top_ids: list[list[int]]
    tie_at: int
    prompt_log_probs: list[float]
    decode: Callable[[list[int]], str]


@pytest.fixture(scope="module")
def reference() -> Callable[[str], Reference]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny_model("llama_deep")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def generate(prompt: str) -> Reference:
        inputs = tokenizer(prompt, return_tensors="pt")
        num_prompt_tokens = inputs["input_ids"].shape[1]
        out = model.generate(
            **inputs,
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
        log_probs = torch.log_softmax(torch.cat(out.logits), dim=-1)  # (num_tokens, vocab)
        ids = out.sequences[0, num_prompt_tokens:]
        best = torch.cat(out.logits).topk(3)
        ties = (best.values[:, 0] - best.values[:, 1] < TIE).nonzero()
        with torch.inference_mode():
            prompt_logits = model(inputs["input_ids"]).logits[0, :-1].log_softmax(-1)

        prompt_log_probs = prompt_logits.gather(1, inputs["input_ids"][0, 1:, None])[:, 0]
        return Reference(
            ids.tolist(),
            log_probs.gather(1, ids[:, None])[:, 0].tolist(),
            best.indices.tolist(),
            int(ties[0]) if len(ties) else len(ids),
            prompt_log_probs.tolist(),
            lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        )

    return generate


def request(prompt: str, **parameters: object) -> dict[str, object]:
    return {
        "inputs": prompt,
        "parameters": {"max_new_tokens": NUM_TOKENS, "details": True, **parameters},
    }


def lines(answer: Answer) -> list[dict[str, Any]]:
    """The records of a stream, with either framing."""
    assert answer.status == 200 and answer.body.endswith(b"\n")
    return [json.loads(line.removeprefix(b"data: ")) for line in answer.body.split(b"\n") if line]


# The text.


@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "one token", "long", "not ASCII"])
def test_greedy_answers_are_those_of_transformers_in_every_form(
    tiny: Server, tight: Server, reference: Callable[[str], Reference], prompt: str
) -> None:
    expected = reference(prompt)
    assert expected.tie_at > 5, "the reference itself cannot tell"

    text = expected.decode(expected.ids)
    for server, output_format in ((s, f) for s in (tiny, tight) for f in FORMATS):
        answer = server.post(request(prompt, output_formatter=output_format))
        name = "logprob" if server is tight else "log_prob"
        if output_format == "json":
            [last] = answered = (
                [json.loads(answer.body)] if server is tiny else json.loads(answer.body)
            )
            tokens = last["details"]["tokens"]
        else:
            *_, last = answered = lines(answer)
            tokens = [record["token"] for record in answered]

        num = expected.tie_at
        assert [token["id"] for token in tokens][:num] == expected.ids[:num]
        assert [token[name] for token in tokens][:num] == pytest.approx(
            expected.log_probs[:num], abs=TOLERANCE
        )
        assert "".join(token["text"] for token in tokens) == last["generated_text"]

        if num == len(expected.ids):
            assert last["generated_text"] == text

        assert last["details"]["finish_reason"] == (
            "eos_token" if expected.ids[-1] == 0 else "length"
        )


def test_prefill_and_top_tokens_are_those_of_transformers(
    tiny: Server, reference: Callable[[str], Reference]
) -> None:
    expected = reference(PROMPTS[0])
    body = request(PROMPTS[0], decoder_input_details=True, logprobs=3, prompt_logprobs=2)
    whole = json.loads(tiny.post(body).body)["details"]
    best = [[token["id"] for token in step] for step in whole["top_tokens"]]

    assert best[: expected.tie_at] == expected.top_ids[: expected.tie_at]
    assert whole["prefill"][0]["log_prob"] is None

    log_probs_found = [token["log_prob"] for token in whole["prefill"][1:]]
    assert log_probs_found == pytest.approx(expected.prompt_log_probs, abs=TOLERANCE)
    assert all(len(token["top_tokens"]) == 2 for token in whole["prefill"][1:])

    streamed = lines(tiny.post({**body, "stream": True}))
    assert [record["top_tokens"] for record in streamed] == whole["top_tokens"]
    assert streamed[-1]["details"]["prefill"] == whole["prefill"]


def test_a_seed_repeats_what_was_sampled_and_another_seed_does_not(tiny: Server) -> None:
    def sampled(seed: int, **more: object) -> Any:
        body = request("The quick", do_sample=True, seed=seed, temperature=1.5, **more)
        return json.loads(tiny.post(body).body)

    assert sampled(1) == sampled(1)
    assert len({sampled(seed)["generated_text"] for seed in range(5)}) == 5

    streamed = lines(
        tiny.post(
            request("The quick", do_sample=True, seed=1, temperature=1.5, output_formatter="sse")
        )
    )

    assert streamed[-1]["generated_text"] == sampled(1)["generated_text"]


def test_a_stop_string_across_tokens_ends_the_text_before_it(tiny: Server) -> None:
    def texts(**parameters: object) -> tuple[str, str]:
        whole = json.loads(tiny.post(request("The quick", **parameters)).body)
        streamed = lines(
            tiny.post(request("The quick", output_formatter="jsonlines", **parameters))
        )

        assert streamed[-1]["generated_text"] == whole["generated_text"]
        assert whole["generated_text"].endswith(
            "".join(record["token"]["text"] for record in streamed)
        )

        return whole["generated_text"], whole["details"]["finish_reason"]

    pieces = json.loads(tiny.post(request("The quick")).body)["details"]["tokens"]
    texts_of_tokens = [piece["text"] for piece in pieces]
    text, reason = texts()
    first, stop = next(
        (i, token_text[-1] + next_text[0])
        for i, (token_text, next_text) in enumerate(pairwise(texts_of_tokens))
        if token_text
        and next_text
        and (token_text + next_text).isascii()
        and text.index(token_text[-1] + next_text[0]) > 0
    )
    before = text[: text.index(stop)]

    assert reason == "length" and before
    assert texts(stop_sequences=["never there", stop]) == (before, "stop_sequence")
    assert texts(stop_sequences=[stop], include_stop_str_in_output=True) == (
        before + stop,
        "stop_sequence",
    )
    assert texts(stop_sequences=[stop], return_full_text=True)[0] == "The quick" + before
    assert texts(stop_token_ids=[pieces[first]["id"]])[1] == "stop_sequence"


def test_every_path_and_content_type_leads_to_the_same_answer(tiny: Server) -> None:
    body = request("The quick")
    expected = json.loads(tiny.post(body).body)
    paths = (
        "/predictions/tiny",
        "/predictions/model",
        "/predictions/tiny/1",
        "/models/model/invoke",
    )
    for path in paths:
        assert json.loads(tiny.post(body, path).body) == expected

    for content_type in ("application/json; charset=utf-8", "application/x-www-form-urlencoded"):
        assert json.loads(tiny.post(body, headers={"Content-Type": content_type}).body) == expected

    plain = tiny.post(b"The quick", headers={"Content-Type": "text/plain"})
    default = tiny.post({"inputs": "The quick"})

    assert plain.body == default.body and plain.status == 200
    assert tiny.post(body, "/predictions/another").status == 404
    assert tiny.post(body, "/predictions/tiny/2").status == 404


# The stream.


def test_a_client_that_reads_as_it_comes_sees_tokens_long_before_the_end(tiny: Server) -> None:
    assert any(runs_on_behind_its_first_token(tiny) for _ in range(MAX_TRIES)), (
        "unless a busy machine keeps us away"
    )


def runs_on_behind_its_first_token(tiny: Server) -> bool:
    """Read a stream. Returns whether its request still ran when its first token was here."""
    body = request("The quick", max_new_tokens=900, ignore_eos_token=True)
    url = f"http://127.0.0.1:{tiny.port}/invocations"
    with httpx2.stream("POST", url, json={**body, "stream": True}, timeout=60) as response:
        assert response.headers["content-type"] == "application/jsonlines"
        records = response.iter_lines()
        first = json.loads(next(records))
        runs_on = tiny.metrics()["lmi_requests_running"] == 1
        further_lines = [json.loads(line) for line in records]

    assert "generated_text" not in first and len(further_lines) == 899
    assert further_lines[-1]["generated_text"] == "".join(
        record["token"]["text"] for record in [first, *further_lines]
    )
    return runs_on


def test_every_record_is_a_chunk_of_its_own(tiny: Server) -> None:
    """A platform that passes on body parts would lose records that are joined or cut."""
    with tiny.connect(request("The quick", output_formatter="sse")) as connection:
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            data = connection.recv(65536)
            assert data, "the connection was closed"
            received += data

    assert b"content-length" not in received.lower().partition(b"\r\n\r\n")[0]

    chunks = list(cut(received.partition(b"\r\n\r\n")[2]))
    assert len(chunks) == NUM_TOKENS

    for chunk in chunks:
        assert chunk.startswith(b"data: {") and chunk.endswith(b"}\n\n") and chunk.count(b"\n") == 2


def cut(body: bytes) -> Iterator[bytes]:
    """The chunks of a chunked body (RFC 9112, 7.1), without the empty last one."""
    while body:
        size, _, body = body.partition(b"\r\n")
        if num_bytes := int(size, 16):
            yield body[:num_bytes]

        body = body[num_bytes + 2 :]


def test_the_client_library_of_tgi_reads_our_answers(tight: Server) -> None:
    client = InferenceClient(model=f"http://127.0.0.1:{tight.port}/invocations", timeout=60)
    whole = client.text_generation("The quick", max_new_tokens=NUM_TOKENS, details=True)
    assert isinstance(whole.details.finish_reason, str) and len(whole.details.tokens) == NUM_TOKENS
    streamed = list(
        client.text_generation("The quick", max_new_tokens=NUM_TOKENS, details=True, stream=True)
    )
    assert [record.token.id for record in streamed] == [token.id for token in whole.details.tokens]
    assert streamed[-1].generated_text == whole.generated_text
    assert streamed[-1].details.generated_tokens == NUM_TOKENS


# The counts.


def test_metrics_of_two_workers_add_up_to_what_the_clients_saw(tiny: Server) -> None:
    before = tiny.metrics()
    workers_before = Counter(workers(tiny))
    bodies = [
        request("The quick", max_new_tokens=1 + n, output_formatter=FORMATS[n % 3])
        for n in range(30)
    ]
    bodies += [request("The quick", top_p=7)] * 5
    answers = []

    def both_answered() -> bool:
        with ThreadPoolExecutor(16) as pool:
            answers.extend(pool.map(tiny.post, bodies))

        return len(Counter(workers(tiny)) - workers_before) == 2

    wait_until(both_answered, "both front ends had some of the requests", 60)
    missing = tiny.post(request("The quick"), "/predictions/another")
    codes = Counter(answer.status for answer in [*answers, missing])
    good = [answer for answer in answers if answer.status == 200]
    counts = [count_tokens(answer) for answer in good]
    wait_until(tiny.is_idle, "all is done")
    after = tiny.metrics()
    grown = {name: after[name] - before[name] for name in after}
    for code in (200, 404, 424):
        assert grown[f'lmi_requests_total{{code="{code}"}}'] == codes[code] > 0

    assert grown["lmi_generated_tokens_total"] == sum(counts)
    assert grown["lmi_prompt_tokens_total"] == 2 * len(good)
    assert grown["lmi_time_to_first_token_seconds_count"] == len(good)
    assert grown["lmi_request_duration_seconds_count"] == len(answers) + 1

    ends = sum(value for name, value in grown.items() if name.startswith("lmi_finished_total"))
    assert ends == len(good)
    assert grown["lmi_inter_token_latency_seconds_count"] == sum(counts) - len(good)
    assert after["lmi_engines_ready"] == 1 and grown["lmi_engine_restarts_total"] == 0


def test_a_client_cannot_read_the_prompt_of_another_off_the_cached_tokens(tiny: Server) -> None:
    """It guesses the next token of a prompt whose beginning it knows, within the first part and
    after it.
    """

    def told(*token_ids: int) -> tuple[int, float]:
        before = tiny.metrics()["lmi_prompt_tokens_cached_total"]
        answer = tiny.post({"prompt": list(token_ids), "max_tokens": 1}, "/v1/completions")
        assert answer.status == 200, answer.body

        usage = json.loads(answer.body)["usage"]
        wait_until(tiny.is_idle, "all is counted")
        counted = tiny.metrics()["lmi_prompt_tokens_cached_total"] - before
        return usage["prompt_tokens_details"]["cached_tokens"], counted

    secret = [5 + place * 7 % 250 for place in range(100)]
    wrong = 300
    filler = [301] * 80
    told(*secret)
    for num_known in (0, 7, 40, 62, 64, 70, 98):
        num_cached = num_known // TOKENS_PER_PART * TOKENS_PER_PART
        for guess in (secret[num_known], wrong):
            assert told(*secret[:num_known], guess, *filler) == (num_cached, num_cached), num_known


def workers(server: Server) -> list[str]:
    """The process that answered, in each line of the access log."""
    return [line["role"] for line in server.log_lines() if line.get("logger") == "lmi.access"]


def is_whole(answer: Answer) -> bool:
    return answer.headers["content-type"] == "application/json"


def count_tokens(answer: Answer) -> int:
    return (
        len(json.loads(answer.body)["details"]["tokens"])
        if is_whole(answer)
        else len(lines(answer))
    )
