"""Reads what is new in a RequestOutput, the object that TensorRT-LLM changes in place at each step of a request.

A `Cursor` knows how much of it was read. Tokens wait until their log-probs are there, and those of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorrt_llm.llmapi import RequestOutput

from handlers.base.outputs import LogProbs, SequenceOutput
from handlers.base.sequence import Sequence
from handlers.lmi_trtllm import beams, captured
from handlers.lmi_trtllm.completions import Ends, OutputFault, cut_off, end_of, of_entries, of_logits


@dataclass(slots=True)
class Output(SequenceOutput):
    rows: captured.Rows | None = None  # of the tensors that the request asked for, at this step


class Cursor:
    """How much of one request's output was read. It belongs to the thread that waits for the output."""

    def __init__(self, name: str, sequence: Sequence) -> None:
        output = sequence.request.output_config
        self._name, self._sequence, self._ends = name, sequence, Ends.of(sequence)
        self._num_top = output.num_top_log_probs
        self._wants_log_probs = output.return_log_probs or output.num_top_log_probs > 0
        self._lacks_prompt = sequence.index == 0 and output.num_prompt_log_probs is not None
        self._num_read = 0  # tokens
        self._is_first = True

    def read(self, output: RequestOutput) -> Output | None:
        """What is new, or None if nothing is. Raises OutputFault if something is missing at the end."""
        if error := getattr(output, "error", None):  # older versions have no such attribute
            raise OutputFault(str(error))
        prompt = self._prompt(output) if self._lacks_prompt else None
        if self._lacks_prompt and prompt is None:
            if output.finished:
                raise OutputFault("the engine reported no log-probs of the prompt")
            return None
        new = self._beams(output) if self._sequence.search is not None else self._tokens(output)
        if new is None:
            return None
        new.prompt_log_probs, self._lacks_prompt = prompt, False
        new.num_cached_tokens = int(output.cached_tokens or 0) if self._is_first else 0
        self._is_first = False
        if self._sequence.captured is not None:
            new.rows = captured.rows_of(output)
        return new

    def _tokens(self, output: RequestOutput) -> Output | None:
        completion = output.outputs[0]
        token_ids = list(completion.token_ids or ())
        num_reported = len(token_ids)
        if output.finished:
            token_ids += cut_off(completion, self._ends)
        new, log_probs = token_ids[self._num_read :], None
        if self._wants_log_probs:
            entries = (completion.logprobs or [])[self._num_read :]  # at the end also that of a token that was cut off
            new = new[: len(entries)]
            if output.finished and self._num_read + len(new) < num_reported:
                raise OutputFault("the engine reported fewer log-probs than tokens")
            log_probs = of_entries(new, entries, self._num_top)
        self._num_read += len(new)
        end = end_of(completion, self._sequence) if output.finished else None
        return Output(self._name, new, log_probs, end=end) if new or end is not None else None

    def _beams(self, output: RequestOutput) -> Output | None:
        known = beams.of_output(output, self._sequence, self._ends)
        if known is None:
            return None
        end = known[0].finish_reason if output.finished else None
        return Output(self._name, [], end=end, beams=known)

    def _prompt(self, output: RequestOutput) -> LogProbs | None:
        """The log-probs of the prompt, or None if they are not there yet."""
        request = self._sequence.request
        token_ids, num_top = request.input_token_ids, request.output_config.num_prompt_log_probs or 0
        entries, logits = output.outputs[0].prompt_logprobs or (), output.context_logits
        if entries or len(token_ids) == 1:
            return of_entries(token_ids[1:], entries, num_top) if len(entries) >= len(token_ids) - 1 else None
        if logits is None or len(logits) < len(token_ids) - 1:
            return None
        return of_logits(token_ids, logits, num_top)
