"""Rows of logits and of the model's further outputs that a request asked for, taken from TensorRT-LLM's results.

Which further outputs there are is up to the model: a forward pass that returns a dictionary names them. No table lists
them, so a declared name that the model lacks shows itself only when a request asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensorrt_llm.llmapi import RequestOutput
from torch import Tensor

from handlers.base.captured import LOGITS, Block
from handlers.base.sequence import Sequence
from lmi.errors import Unsupported
from lmi.executor import OutputConfig, Request

NO_BEAMS = "TensorRT-LLM's rows of logits and outputs do not follow the beams"


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows that one result of the engine has, by the name of their output; on any device, of any type.

    Those of the prompt are (num_tokens, …), the last ones of it. Those of generated tokens are (num_tokens, …), from
    the first token on or from the first new one.
    """

    context: dict[str, Tensor]
    generation: dict[str, Tensor]


def check(request: Request) -> None:
    """Raise Unsupported for rows beside beams, except for the logits of the prompt."""
    output = request.output_config
    if request.sampling_config.beam_width > 1:
        if output.return_generation_logits:
            raise Unsupported("return_generation_logits", NO_BEAMS)
        if output.additional_model_outputs:
            raise Unsupported("additional_model_outputs", NO_BEAMS)


def ask(output: OutputConfig) -> dict[str, Any]:
    """The keyword arguments of SamplingParams for what a request wants. The contract's `logits` is two flags there."""
    outputs = output.additional_model_outputs
    logits = [one for one in outputs if one.name == LOGITS]
    names = [one.name for one in outputs if one.name != LOGITS]
    return {
        "return_context_logits": output.return_context_logits or any(one.gather_context for one in logits),
        "return_generation_logits": output.return_generation_logits or bool(logits),
        "additional_model_outputs": names or None,
    }


def rows_of(result: RequestOutput) -> Rows:
    """The rows of a result, which changes with the next step: call it before."""
    output = result.outputs[0]
    context, generation = dict(output.additional_context_outputs or {}), {}
    if result.context_logits is not None:
        context[LOGITS] = result.context_logits
    if output.generation_logits is not None:
        generation[LOGITS] = output.generation_logits
    for name, rows in (output.additional_generation_outputs or {}).items():
        generation[name] = rows.flatten(1)  # from (num_tokens, 1, size)
    return Rows(context, generation)


def note(sequence: Sequence, rows: Rows, num_new: int) -> None:
    """Keep the rows of a result that brings `num_new` tokens, before these are appended.

    Fails the sequence if a token has no row.
    """
    captured = sequence.captured
    if captured is None:
        return
    for name in captured.context:
        if name in rows.context and not captured.context[name].end:
            block = _block(rows.context[name])
            captured.put_context(name, sequence.num_prompt_tokens - len(block.rows), block)
    for name, kept in captured.generation.items() if num_new else ():
        new = _new_rows(rows.generation.get(name), sequence.num_generated, num_new)
        if new is None:
            sequence.fail(f"the model gave no row of {name} for each token of a step")
            return
        kept.put(sequence.num_generated, _block(new))


def _new_rows(rows: Tensor | None, num_before: int, num_new: int) -> Tensor | None:
    """The rows of the new tokens, or None if there are not as many: an answer may repeat the rows of earlier tokens."""
    if rows is None or len(rows) < num_new:
        return None
    if len(rows) >= num_before + num_new:
        return rows[num_before : num_before + num_new]
    return rows if len(rows) == num_new else None


def _block(rows: Tensor) -> Block:
    """From (num_tokens, …). Numbers with a fraction are float32."""
    rows = rows.float() if rows.is_floating_point() else rows
    array = rows.contiguous().cpu().numpy()
    return Block(tuple(array.shape[1:]), array.dtype.name, [row.tobytes() for row in array])
