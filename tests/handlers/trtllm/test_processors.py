"""The functions that TensorRT-LLM's processes call before they draw a token, called here as its
model engine does.
"""

from __future__ import annotations

import inspect
import logging
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from handlers.base.sequence import Sequence, new_sequences
from handlers.driven.outputs import SequenceOutput
from handlers.lmi_trtllm import processors
from handlers.lmi_trtllm.processors import BadWords, Faults, PostProcessor
from lmi.errors import BadConfiguration, GenerationFailed, ModelUnusable, Unsupported
from lmi.executor import Request
from lmi.settings.config import EngineConfig

VOCAB_SIZE = 8
PROMPT = (1, 2, 3)
FILE = """
import json, os, sys
import torch
from lmi.executor import LogitsPostProcessorConfig

with open(__file__ + ".reads", "a") as reads:
    reads.write(f"{os.getpid()}\\n")

def note(request_id, logits, tokens, stream, client_id):
    with open(__file__ + ".calls", "a") as calls:
        calls.write(json.dumps([request_id, list(logits.shape), str(logits.dtype), tokens, stream, client_id]) + "\\n")
    logits[..., 5] = 50.0

def give(request_id, logits, tokens, stream, client_id):
    return torch.full_like(logits, 7.0)

def shrink(request_id, logits, tokens, stream, client_id):
    return logits[..., :2]

def fail(request_id, logits, tokens, stream, client_id):
    logits += 1000
    raise KeyError("no such thing")

def leave(request_id, logits, tokens, stream, client_id):
    sys.exit(3)

def many(request_ids, logits, tokens, stream, client_ids):
    for row, client_id in zip(logits, client_ids, strict=True):
        row[..., client_id] = 9.0
    logits[0] = logits[0] + 1

logits_post_processors = LogitsPostProcessorConfig(
    processor_map={"note": note, "give": give, "shrink": shrink, "fail": fail, "leave": leave}, processor_batched=many
)
"""  # noqa: E501
CALL_THERE = """
import pickle, sys, torch
for processor in 2 * pickle.load(sys.stdin.buffer):
    processor(77, torch.zeros(1, 1, 8), [[1, 2, 3]], None, None)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "post.py").write_text(FILE)
    return str(tmp_path / "post.py")


@pytest.fixture
def faults() -> Iterator[Faults]:
    faults = Faults()
    yield faults
    faults.close()


def sequence_of(**fields: Any) -> Sequence:
    [sequence] = new_sequences(4, Request(PROMPT, 8, end_id=0, **fields), 100)
    return sequence


def post_processor(name: str, file: str, faults: str) -> PostProcessor:
    chain = processors.of(sequence_of(logits_post_processor_name=name, client_id=6), file, faults)
    assert chain is not None and isinstance(chain[0], PostProcessor)
    return chain[0]


def call(
    processor: PostProcessor | BadWords, *beams: list[int], dtype: torch.dtype = torch.float32
) -> Tensor:
    """The logits (num_beams, vocab) after a call with the tokens that each beam has generated."""
    logits = torch.zeros(len(beams), 1, VOCAB_SIZE, dtype=dtype)
    processor(77, logits, [[*PROMPT, *beam] for beam in beams], None, None)
    return logits[:, 0]


def test_a_word_of_several_tokens_loses_its_last_one_only_after_the_others() -> None:
    processor = BadWords(((4, 5), (4, 5, 6), (7, 2)), len(PROMPT))
    rows = call(processor, [], [4], [4, 5], [5, 4], [2])
    assert [row.isneginf().nonzero().flatten().tolist() for row in rows] == [[], [5], [6], [5], []]


def test_a_word_never_begins_in_the_prompt() -> None:
    assert not call(BadWords(((3, 5),), len(PROMPT)), []).isinf().any()


def test_the_engine_can_send_the_functions_to_its_ranks_and_counts_five_parameters(
    file: str, faults: Faults
) -> None:
    """Its model engine asserts four or five, and passes them by place."""
    sequence = sequence_of(logits_post_processor_name="note", bad_words=((4, 5), (6,)))
    chain = processors.of(sequence, file, faults.path)
    assert chain is not None and [type(processor) for processor in chain] == [
        PostProcessor,
        BadWords,
    ]
    assert pickle.loads(pickle.dumps(chain)) == chain
    assert [len(inspect.signature(processor).parameters) for processor in chain] == [5, 5]


def test_a_sequence_without_a_name_and_without_such_words_needs_no_function(faults: Faults) -> None:
    assert processors.of(sequence_of(bad_words=((6,),)), None, faults.path) is None


def test_a_post_processor_sees_what_the_contract_says_and_changes_the_logits(
    file: str, faults: Faults
) -> None:
    rows = call(post_processor("note", file, faults.path), [4], [4, 5])
    assert (
        Path(file + ".calls").read_text()
        == '[4, [1, 2, 8], "torch.float32", [[4], [4, 5]], null, 6]\n'
    )
    assert rows[:, 5].tolist() == [50.0, 50.0] and rows.count_nonzero() == 2
    assert faults.take() == {}


def test_logits_of_half_precision_are_seen_as_float32_and_changed_too(
    file: str, faults: Faults
) -> None:
    rows = call(post_processor("note", file, faults.path), [4], dtype=torch.bfloat16)
    assert '"torch.float32"' in Path(file + ".calls").read_text()
    assert rows.dtype == torch.bfloat16 and rows[0, 5] == 50.0


def test_a_tensor_that_a_post_processor_gives_back_takes_the_place_of_the_logits(
    file: str, faults: Faults
) -> None:
    assert (
        call(post_processor("give", file, faults.path), [4], [5]).tolist()
        == [[7.0] * VOCAB_SIZE] * 2
    )


def test_the_batched_function_gets_a_batch_of_one(file: str, faults: Faults) -> None:
    rows = call(post_processor("batched", file, faults.path), [4])
    assert rows[0].tolist() == [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 10.0, 1.0]


def test_errors_in_another_process_leave_it_alive_and_are_told_here(
    file: str, faults: Faults
) -> None:
    messages = {
        "fail": "logits post-processor 'fail' failed: KeyError: 'no such thing'",
        "leave": "logits post-processor 'leave' failed: SystemExit: 3",
        "shrink": (
            "logits post-processor 'shrink' failed: ValueError: what it returns must be "
            "None "
            "or a tensor of "
        ),
    }
    there = [replace(post_processor(name, file, faults.path), sequence=name) for name in messages]
    command = [sys.executable, "-c", CALL_THERE]
    subprocess.run(command, input=pickle.dumps(there), check=True, capture_output=True, timeout=100)
    told_faults = faults.take()

    assert told_faults.keys() == messages.keys() and all(
        str(told_faults[name]).startswith(messages[name]) for name in messages
    )
    assert (
        all(type(error) is GenerationFailed for error in told_faults.values())
        and faults.take() == {}
    )
    assert len(Path(file + ".reads").read_text().splitlines()) == 1  # for six calls


def test_an_error_ends_its_sequence_and_drops_a_token_that_came_with_it(
    file: str, faults: Faults
) -> None:
    call(post_processor("fail", file, faults.path), [])
    neighbour = SequenceOutput("3.0", [5])
    outputs, failed = faults.end([SequenceOutput("4.0", [7]), neighbour])
    assert outputs[0] is neighbour and failed == ["4.0"]
    assert (outputs[1].id, outputs[1].token_ids) == ("4.0", []) and isinstance(
        outputs[1].end, GenerationFailed
    )
    assert faults.end([neighbour]) == ([neighbour], [])


def test_an_error_whose_text_is_not_utf_8_is_told_as_far_as_it_is(
    file: str, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    # Pytest cannot report such a text of the log
    caplog.set_level(logging.CRITICAL, processors.__name__)
    Path(file).write_text(FILE.replace('KeyError("no such thing")', r'ValueError("no \udcff")'))
    call(post_processor("fail", file, faults.path), [])
    assert str(faults.take()["4.0"]) == "logits post-processor 'fail' failed: ValueError: no ?"


def test_an_error_that_cannot_be_told_leaves_the_other_requests_alone(
    file: str, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    call(post_processor("fail", file, "/proc/none/fd/1"), [])
    messages = [
        record.message.split(":")[0] for record in caplog.records if "not told" in record.message
    ]
    assert messages == ["request 4 is not told"]
    assert faults.take() == {}


def test_more_errors_than_the_pipe_holds_block_nobody(file: str, faults: Faults) -> None:
    processor = post_processor("fail", file, faults.path)
    for _ in range(1500):
        call(processor, [])

    assert list(faults.take()) == ["4.0"]
    call(processor, [])
    assert list(faults.take()) == ["4.0"]


def test_the_file_lies_in_the_models_folder_and_says_the_names(file: str) -> None:
    config = EngineConfig(logits_post_processors="post.py")
    assert processors.file_of(config, str(Path(file).parent)) == file
    assert processors.names(file) == ("note", "give", "shrink", "fail", "leave", "batched")
    assert processors.file_of(EngineConfig(), "/model") is None and processors.names(None) == ()


def test_a_wrong_file_stops_the_start_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("x = 1\nlogits_post_processors = x / 0\n")
    with pytest.raises(ModelUnusable, match=r"wrong\.py, line 2: ZeroDivisionError"):
        processors.names(str(tmp_path / "wrong.py"))


def test_words_of_several_tokens_need_an_engine_whose_functions_see_the_last_token() -> None:
    request = Request(PROMPT, 8, bad_words=((6,), (4, 5)))
    processors.check(request, sees_tokens=True)
    processors.check(Request(PROMPT, 8, bad_words=((6,),)), sees_tokens=False)
    with pytest.raises(
        Unsupported,
        match=r"^bad_words is not supported here: .*option.disable_overlap_scheduler=true",
    ):
        processors.check(request, sees_tokens=False)


def test_post_processors_turn_the_overlap_scheduler_off_and_refuse_it() -> None:
    assert processors.arguments(None, {"disable_overlap_scheduler": False}) == {}
    assert processors.arguments("post.py", {}) == {"disable_overlap_scheduler": True}
    with pytest.raises(
        BadConfiguration, match="^option.disable_overlap_scheduler=false: allowed is true beside"
    ):
        processors.arguments("post.py", {"disable_overlap_scheduler": False})
