"""Functions that change a sequence's logits, which the processes of TensorRT-LLM call before they
draw a token.

They are small and picklable, as a `SamplingParams` sends them to every rank. An error that leaves
one ends all requests that run, so it goes through a `Faults` to the process of the executor, which
ends only this request.
"""

import contextlib
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from handlers.base.post_processors import BATCHED, load_post_processors
from handlers.base.sequence import Sequence
from handlers.driven.engine import name_of
from handlers.driven.outputs import SequenceOutput
from lmi.errors import (
    BadConfiguration,
    GenerationFailed,
    Unsupported,
    error_line,
    shorten,
    writable,
)
from lmi.executor import LogitsPostProcessorConfig, Request
from lmi.executor.checks import broken
from lmi.settings.config import EngineConfig

# A write of at most 4096 bytes to a pipe is never split.
MAX_FAULT_CHARS = 600
NO_OVERLAP = "disable_overlap_scheduler"
NEEDS_TOKENS = (
    f"words of several tokens need option.{NO_OVERLAP}=true, without which a token comes late"
)

log = logging.getLogger(__name__)


class Faults:
    """The faults of all post-processors of an executor, which its own thread reads."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Any process of this machine writes them there.
        self.path = f"/proc/{os.getpid()}/fd/{self._write_fd}"

    def take(self) -> dict[str, GenerationFailed]:
        """Return the new faults, by the names of their sequences."""
        lines = b""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._read_fd, 1 << 16):
                lines += part

        faults = {}
        for line in lines.splitlines():
            name, message = msgspec.json.decode(line, type=tuple[str, str])
            faults[name] = GenerationFailed(message)

        return faults

    def end(self, outputs: Iterable[SequenceOutput]) -> tuple[list[SequenceOutput], list[str]]:
        """End the sequences with new faults. Returns the outputs with these ends, and the names of
        the sequences.

        A fault is written before its token is drawn. So that token comes together with the fault or
        later, and is dropped.
        """
        faults = self.take()
        results = [output for output in outputs if output.id not in faults]
        for name, error in faults.items():
            results.append(SequenceOutput(name, [], end=error))

        return results, list(faults)

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._read_fd)
        os.close(self._write_fd)


@dataclass(frozen=True, slots=True)
class PostProcessor:
    """Calls a function of the user's file as the contract says: see LogitsPostProcessor in
    lmi.executor.

    The engine calls it with its own request id, the logits (num_beams, 1, vocab), the tokens of
    each beam together with the prompt, and two arguments that are always None. With the engine's
    overlap scheduler the last token would not be among them. The engine ignores its own batched
    form, so the batched function is called with a batch of one.
    """

    file: str
    function: str
    # The name of the sequence at the engine.
    sequence: str
    request_id: int
    client_id: int | None
    num_prompt_tokens: int
    # The path of a `Faults`.
    faults: str

    def __call__(
        self,
        req_id: int,
        logits: Tensor,
        token_ids: list[list[int]],
        stream_ptr: int | None,
        client_id: int | None,
    ) -> None:
        try:
            self._call(logits, [ids[self.num_prompt_tokens :] for ids in token_ids])
        except (Exception, SystemExit) as error:
            title = f"logits post-processor {shorten(self.function)}"
            if self.function == BATCHED:
                title = "the batched logits post-processor"

            log.exception("%s failed for request %d", title, self.request_id)
            self._report(f"{title} failed: {error_line(error)}")

    def _report(self, reason: str) -> None:
        fault = (self.sequence, writable(reason[:MAX_FAULT_CHARS]))
        try:
            fd = os.open(self.faults, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(fd, "wb") as pipe:
                os.write(pipe.fileno(), msgspec.json.encode(fault) + b"\n")
        except OSError as error:
            # The pipe is not here, or it is full.
            log.error("request %d is not told: %s", self.request_id, error)

    def _call(self, logits: Tensor, token_ids: list[list[int]]) -> None:
        """Let the function change the logits (num_beams, 1, vocab). It sees them as float32 (1,
        num_beams, vocab).
        """
        rows = logits.transpose(0, 1).float()
        stream = torch.cuda.current_stream(rows.device) if rows.is_cuda else None
        config = _loaded(self.file)
        if self.function == BATCHED:
            assert config.processor_batched is not None
            batch = [rows]
            config.processor_batched(
                [self.request_id], batch, [token_ids], stream, [self.client_id]
            )
            changed: object = batch[0]
        else:
            changed = config.processor_map[self.function](
                self.request_id, rows, token_ids, stream, self.client_id
            )

        new = _rows(changed, rows)
        if new is not rows or rows.dtype is not logits.dtype:
            logits.copy_(new.transpose(0, 1))


@dataclass(frozen=True, slots=True)
class BadWords:
    """Bans the last token of a word of several tokens, where the sequence ends with the others."""

    words: tuple[tuple[int, ...], ...]
    num_prompt_tokens: int

    def __call__(
        self,
        req_id: int,
        logits: Tensor,
        token_ids: list[list[int]],
        stream_ptr: int | None,
        client_id: int | None,
    ) -> None:
        for beam, ids in enumerate(token_ids):
            generated = ids[self.num_prompt_tokens :]
            banned = []
            for word in self.words:
                if tuple(generated[1 - len(word) :]) == word[:-1]:
                    banned.append(word[-1])

            if banned:
                logits[beam, 0, banned] = -torch.inf


def _rows(changed: object, rows: Tensor) -> Tensor:
    """Return what a function gave back, or the rows that it changed in place.

    Raises ValueError if it has another shape.
    """
    if changed is None:
        return rows

    if not isinstance(changed, Tensor) or changed.shape != rows.shape:
        value = tuple(changed.shape) if isinstance(changed, Tensor) else changed
        raise broken("what it returns", f"None or a tensor of shape {tuple(rows.shape)}", value)

    return changed


@lru_cache(maxsize=8)
def _loaded(file: str) -> LogitsPostProcessorConfig:
    return load_post_processors(Path(file))


def file_of(config: EngineConfig, model_path: str) -> str | None:
    """Return the file of post-processors that an option names, in the model's folder."""
    name = config.logits_post_processors
    if name is None:
        return None

    return str(Path(model_path, name).resolve())


def arguments(file: str | None, llm_arguments: Mapping[str, Any]) -> dict[str, bool]:
    """Return what LLM needs for post-processors beside its other arguments.

    Raises BadConfiguration if an option says otherwise.
    """
    if file is None:
        return {}

    if llm_arguments.get(NO_OVERLAP) is False:
        rule = (
            "true beside option.logits_post_processors, whose functions miss the last token "
            "otherwise"
        )
        raise BadConfiguration(f"option.{NO_OVERLAP}=false: allowed is {rule}")

    return {NO_OVERLAP: True}


def names(file: str | None) -> tuple[str, ...]:
    """Return the names that a request may give. Raises ModelUnusable for a wrong file."""
    if file is None:
        return ()

    config = _loaded(file)
    if config.processor_batched is None:
        return tuple(config.processor_map)

    return (*config.processor_map, BATCHED)


def check(request: Request, *, sees_tokens: bool) -> None:
    """Raise Unsupported for words of several tokens if the engine's functions do not see all
    tokens.
    """
    if not sees_tokens and any(len(word) > 1 for word in request.bad_words):
        raise Unsupported("bad_words", NEEDS_TOKENS)


def of(sequence: Sequence, file: str | None, faults: str) -> list[PostProcessor | BadWords] | None:
    """Return what changes the logits of a sequence, in the order of the calls, or None if nothing
    does.
    """
    request = sequence.request
    num_prompt_tokens = sequence.num_prompt_tokens
    processors: list[PostProcessor | BadWords] = []
    if request.logits_post_processor_name is not None:
        assert file is not None
        post_processor = PostProcessor(
            file,
            request.logits_post_processor_name,
            name_of(sequence),
            sequence.id,
            request.client_id,
            num_prompt_tokens,
            faults,
        )
        processors.append(post_processor)

    words = tuple(word for word in request.bad_words if len(word) > 1)
    if words:
        processors.append(BadWords(words, num_prompt_tokens))

    return processors or None
