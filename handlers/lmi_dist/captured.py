"""The rows of logits and of declared outputs that requests ask for, taken from a step.

They are taken before the rules of a request change the logits. The bytes of a row depend on nothing
but its sequence, where the runner is batch-invariant.
"""

from collections.abc import Hashable

from handlers.base.captured import LOGITS
from handlers.lmi_dist.arrays import Array
from handlers.lmi_dist.plan import Chunk
from handlers.lmi_dist.runner import Runner
from handlers.lmi_dist.sequence import EmbeddedSequence


def take_prompt(
    runner: Runner, sequence: EmbeddedSequence, chunk: Chunk, logits: Array, first: int
) -> None:
    """Keep the rows of a chunk of a prompt, which begin at row `first` of `logits`.

    `logits`: those of the step, (num_logits, vocab).
    """
    captured = sequence.captured
    assert captured is not None
    end = first + chunk.num_logits

    for name in captured.context:
        rows = _rows_of(name, runner, logits)[first:end]
        captured.put_context(name, chunk.start, rows)


def take_draws(
    runner: Runner, logits: Array, rows: list[int], sequences: list[EmbeddedSequence]
) -> None:
    """Keep the row from which each sequence draws its next token.

    `logits`: those of the step, (num_logits, vocab).
    """
    for row, sequence in zip(rows, sequences, strict=True):
        captured = sequence.captured
        if captured is None:
            continue

        # The number of the token, or of a beam all tokens before it.
        place: Hashable = sequence.num_generated
        if sequence.request.sampling_config.beam_width > 1:
            place = tuple(sequence.token_ids[sequence.num_prompt_tokens :])

        for name, kept_rows in captured.generation.items():
            row_of_token = _rows_of(name, runner, logits)[row : row + 1]
            kept_rows.put([place], row_of_token)


def _rows_of(name: str, runner: Runner, logits: Array) -> Array:
    """Return the rows of the last step's logits or of another output, (num_logits, …)."""
    if name == LOGITS:
        return logits

    return runner.output(name)
