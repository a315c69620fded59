"""What requests want of a step beside tokens: rows of the logits and of declared outputs.

Rows are taken from a step before the sampler and its rules change the logits. The bytes of a row
depend on nothing but its sequence, where the runner is batch-invariant.
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
    """Keep the rows of a chunk of a prompt, which begin at row `first` of `logits` (num_logits,
    vocab).
    """
    captured = sequence.captured
    assert captured is not None

    for name in captured.context:
        rows = _rows(runner, name, logits)[first : first + chunk.num_logits]
        captured.put_context(name, chunk.start, rows)


def take_draws(
    runner: Runner, logits: Array, rows: list[int], sequences: list[EmbeddedSequence]
) -> None:
    """Keep the row of `logits` (num_logits, vocab) from which each sequence draws its
    next token.
    """
    for row, sequence in zip(rows, sequences, strict=True):
        captured = sequence.captured
        if captured is None:
            continue

        for name, rows_of_output in captured.generation.items():
            place: Hashable = sequence.num_generated
            if sequence.request.sampling_config.beam_width > 1:
                place = tuple(sequence.token_ids[sequence.num_prompt_tokens :])

            rows_of_output.put([place], _rows(runner, name, logits)[row : row + 1])


def _rows(runner: Runner, name: str, logits: Array) -> Array:
    """The rows of the runner's last step, (num_logits, …)."""
    return logits if name == LOGITS else runner.output(name)
