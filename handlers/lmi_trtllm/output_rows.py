"""The rows of logits and of declared outputs that a request asks for."""

from itertools import count
from typing import NamedTuple

from tensorrt_llm.llmapi import RequestOutput
from torch import Tensor

from handlers.base.captured import LOGITS, Array
from handlers.base.sequence import Sequence


class OutputRows(NamedTuple):
    """The rows (num_tokens, …) of a result by the name of their output, on any device."""

    # The last ones of the prompt.
    context: dict[str, Tensor]
    # Those of generated tokens: of all, or only of the new ones.
    generation: dict[str, Tensor]


def rows_of(result: RequestOutput) -> OutputRows:
    """Return the rows of a result. Call it before the next step, which changes the result."""
    output = result.outputs[0]
    context = dict(output.additional_context_outputs or {})
    generation = dict[str, Tensor]()
    if result.context_logits is not None:
        context[LOGITS] = result.context_logits

    if output.generation_logits is not None:
        generation[LOGITS] = output.generation_logits

    for name, rows in (output.additional_generation_outputs or {}).items():
        # They are (num_tokens, 1, size).
        generation[name] = rows.flatten(1)

    return OutputRows(context, generation)


def note_rows(sequence: Sequence, rows: OutputRows, num_new: int) -> None:
    """Keep the rows of a result, of which `num_new` tokens are to be appended to a sequence.

    The sequence fails if one of them has no row.
    """
    captured = sequence.captured
    assert captured is not None
    for name in captured.context:
        if name in rows.context and not captured.context[name].by_place:
            block = _array(rows.context[name])
            captured.put_context(name, sequence.num_prompt_tokens - len(block), block)

    if not num_new:
        return

    for name, captured_rows in captured.generation.items():
        new = _new_rows(rows.generation.get(name), sequence.num_generated, num_new)
        if new is None:
            sequence.fail(f"the model gave no row of {name} for each token of a step")
            return

        captured_rows.put(count(sequence.num_generated), _array(new))


def _new_rows(rows: Tensor | None, num_before: int, num_new: int) -> Tensor | None:
    """Return the rows of the new tokens, or None if there are not as many.

    `rows` may begin with those of the `num_before` earlier tokens.
    """
    if rows is None or len(rows) < num_new:
        return None

    if len(rows) >= num_before + num_new:
        return rows[num_before : num_before + num_new]

    return rows if len(rows) == num_new else None


def _array(rows: Tensor) -> Array:
    """Return rows (num_tokens, …) on the host. Numbers with a fraction become float32."""
    if rows.is_floating_point():
        rows = rows.float()

    return rows.contiguous().cpu().numpy()
