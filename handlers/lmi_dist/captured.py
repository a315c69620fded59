"""The additional outputs that a configuration declares, and the rows of these and of the logits that requests want.

Rows are taken from a step before the sampler and its rules change the logits. The bytes of a row depend on nothing but
its sequence, where the runner is batch-invariant.
"""

import difflib
from collections.abc import Hashable, Iterable

from handlers.base.captured import LOGITS
from handlers.base.configuration import CONTEXT
from handlers.lmi_dist.runner import Chunk, Runner
from handlers.lmi_dist.sequence import EmbeddedSequence
from handlers.lmi_dist.weights import Array
from lmi.errors import BadConfiguration, shorten
from lmi.settings.config import EngineConfig

HIDDEN_STATES = "hidden_states"  # after the last norm


def layer_name(layer: int) -> str:
    """The name of what a layer gives to the next one."""
    return f"{HIDDEN_STATES}.{layer}"


def hidden_names(num_layers: int) -> tuple[str, ...]:
    """The outputs that every model has beside the logits."""
    return (HIDDEN_STATES, *map(layer_name, range(num_layers)))


def declared_names(config: EngineConfig, known: Iterable[str]) -> list[str]:
    """The declared outputs that a runner keeps, which are all but the logits.

    Raises BadConfiguration with one line for each that is not `known`, which names the nearest one.
    """
    texts = (text.removesuffix(CONTEXT) for text in config.additional_outputs)
    names = [name for name in texts if name != LOGITS]
    known = [LOGITS, *known]
    faults = [
        f"additional_outputs: the model has no output {shorten(name)}; the nearest is "
        + difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        for name in names
        if name not in known
    ]
    if faults:
        raise BadConfiguration("\n".join(faults))
    return names


def take_prompt(runner: Runner, sequence: EmbeddedSequence, chunk: Chunk, logits: Array, first: int) -> None:
    """Keep the rows of a chunk of a prompt, which begin at row `first` of `logits` (num_logits, vocab)."""
    captured = sequence.captured
    assert captured is not None
    for name in captured.context:
        captured.put_context(name, chunk.start, _rows(runner, name, logits)[first : first + chunk.num_logits])


def take_draws(runner: Runner, logits: Array, rows: list[int], sequences: list[EmbeddedSequence]) -> None:
    """Keep the row of `logits` (num_logits, vocab) from which each sequence draws its next token."""
    for row, sequence in zip(rows, sequences, strict=True):
        if (captured := sequence.captured) is None:
            continue
        for name, kept in captured.generation.items():
            place: Hashable = sequence.num_generated
            if sequence.request.sampling_config.beam_width > 1:
                place = tuple(sequence.token_ids[sequence.num_prompt_tokens :])
            kept.put([place], _rows(runner, name, logits)[row : row + 1])


def _rows(runner: Runner, name: str, logits: Array) -> Array:
    """The rows of the runner's last step, (num_logits, …)."""
    return logits if name == LOGITS else runner.output(name)
