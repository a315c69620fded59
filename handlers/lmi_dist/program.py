"""The program of a decoder: the operations of a step, with their weights from a checkpoint.

All tokens of a step are rows of the same buffers. Behind the attention of the last layer only the
tokens whose logits are wanted go on, in buffers of their own. Heads stay in the order of the
checkpoint: the queries that share a key head are neighbours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from msgspec import Struct
from msgspec.structs import replace

from handlers.lmi_dist.facts import ModelFacts
from handlers.lmi_dist.families import Architecture
from handlers.lmi_dist.linear_sites import MAX_MODULES, Site, qkv_widths, sites_of_layer
from handlers.lmi_dist.lora_limits import LoraLimits
from handlers.lmi_dist.operation_reader import OperationReader, Place, place_for_kernels
from handlers.lmi_dist.operations import (
    Cap,
    Gather,
    Linear,
    Operation,
    Pack,
    PackBlocks,
    Packed,
    Program,
    Shrink,
)
from handlers.lmi_dist.output_names import HIDDEN_STATES, declared_names, hidden_names, layer_name
from handlers.lmi_dist.unused_tensors import tell_unused
from handlers.lmi_dist.weights import Checkpoint
from lmi.executor import Progress
from lmi.settings.config import EngineConfig


class _Buffers(Struct, frozen=True):
    """The numbers of the buffers that have the same tokens as rows."""

    # The residual, (hidden_size,).
    residual: int
    # What attention and feed-forward read, (hidden_size,).
    normed: int
    # What attention gives, (num_heads * head_dim,).
    heads: int
    # The inside of the feed-forward, (intermediate_size,).
    inner: int


# Of all tokens of a step.
_ALL = _Buffers(0, 1, 2, 3)
# Queries, keys and values of all tokens.
_QKV = 4
# Of the tokens whose logits are wanted.
_WANTED = _Buffers(5, 6, 7, 8)
# From here on there is a buffer for each gathered output, and then one for the logits.
_FIRST_OUTPUT = 9


def load(
    facts: ModelFacts,
    config: EngineConfig,
    max_length: int,
    progress: Progress,
    pack: Pack[Packed],
    place: Place = place_for_kernels,
    pack_blocks: PackBlocks[Packed] | None = None,
) -> Program[Packed]:
    """Return the program of a checkpoint, with room for adapters where the options enable them.

    Every tensor is read once, in the order of the operations, and packed or placed before the next
    one is read. With `pack_blocks` weights that are stored in blocks stay so; else they become
    floats. An embedding model has no head: the states behind the last norm stand in the place of
    the logits.
    """
    assert facts.architecture is not None
    architecture = facts.architecture
    has_head = facts.pooling is None
    limits = LoraLimits.of(config.options)
    outputs = declared_names(config, hidden_names(architecture.num_layers))

    # It refuses pickles.
    checkpoint = Checkpoint(facts.path, allow_pickle=config.allow_pickle, progress=progress)
    reader = OperationReader(architecture, checkpoint, pack, max_length, place, pack_blocks)

    gathered = _gathered(architecture, outputs)
    logits = _FIRST_OUTPUT + len(gathered)
    operations: list[Operation[Packed]] = [reader.embed(_ALL.residual)]
    for layer in range(architecture.num_layers):
        operations += _layer(reader, layer)
        name = layer_name(layer)
        if name in gathered:
            operations.append(Gather(_ALL.residual, gathered[name]))

    if has_head:
        operations += _head(reader, logits)
    else:
        operations.append(reader.norm("norm", _WANTED.residual, logits))

    tell_unused(facts.path, checkpoint.unused() - reader.names_without_use(has_head))
    checkpoint.release_pages()

    buffer_of_output = _states_that_stay(architecture) | gathered
    program = Program(
        operations=tuple(operations),
        widths=_widths(architecture, len(gathered), has_head),
        wanted=frozenset(range(_WANTED.residual, logits + 1)),
        outputs={name: buffer_of_output[name] for name in outputs},
        num_layers=architecture.num_layers,
        num_heads=architecture.num_heads,
        num_kv_heads=architecture.num_kv_heads,
        head_dim=architecture.head_dim,
        vocab_size=architecture.vocab_size,
        max_length=max_length,
    )

    if limits is None:
        return program

    return adapted(program, limits.max_rank)


def _states_that_stay(architecture: Architecture) -> dict[str, int]:
    """Return the buffers of the hidden states that the last operations leave as they are."""
    has_last_norm = "norm" in architecture.names
    return {
        HIDDEN_STATES: _WANTED.normed if has_last_norm else _WANTED.residual,
        layer_name(architecture.num_layers - 1): _WANTED.residual,
    }


def _gathered(architecture: Architecture, outputs: Collection[str]) -> dict[str, int]:
    """Return a buffer for each declared output that a later layer writes over.

    The rows whose logits are wanted are gathered into it.
    """
    staying = _states_that_stay(architecture)
    names: list[str] = []
    for name in hidden_names(architecture.num_layers):
        if name in outputs and name not in staying:
            names.append(name)

    return {name: buffer for buffer, name in enumerate(names, start=_FIRST_OUTPUT)}


def _widths(architecture: Architecture, num_gathered: int, has_head: bool) -> tuple[int, ...]:
    """Return the number of floats in a row of each buffer, by its number."""
    hidden_size = architecture.hidden_size
    of_rows = (
        hidden_size,
        hidden_size,
        architecture.num_heads * architecture.head_dim,
        architecture.intermediate_size,
    )
    qkv_width = sum(qkv_widths(architecture))
    of_outputs = [hidden_size] * num_gathered
    logits_width = architecture.vocab_size if has_head else hidden_size
    return (*of_rows, qkv_width, *of_rows, *of_outputs, logits_width)


def _layer(reader: OperationReader[Packed], layer: int) -> Iterator[Operation[Packed]]:
    """Yield attention of all tokens and the feed-forward, in the last layer only of wanted tokens.

    As in Llama: residual += output(heads); residual += feed_forward(norm(residual)). Phi feeds
    forward what attention has read. In the first transformers a norm follows each sum instead.
    """
    architecture = reader.architecture
    is_last = layer == architecture.num_layers - 1
    is_post_norm = architecture.is_post_norm
    sites = sites_of_layer(architecture, layer)

    # Attention.
    if not is_post_norm:
        yield reader.norm("input_norm", _ALL.residual, _ALL.normed, layer)

    attention_input = _ALL.residual if is_post_norm else _ALL.normed
    rows = _WANTED if is_last else _ALL
    yield reader.linear(sites.qkv, attention_input, _QKV)
    yield reader.attend(layer, _QKV, rows.heads, is_wanted=is_last)
    if is_last:
        yield Gather(_ALL.residual, rows.residual)

    if is_last and architecture.is_parallel:
        yield Gather(_ALL.normed, rows.normed)

    yield from _added(reader, sites.output, rows.heads, rows, "post_attention_norm", layer)

    # The feed-forward.
    if is_post_norm:
        yield reader.norm("input_norm", rows.residual, rows.residual, layer)
    elif not architecture.is_parallel:
        yield reader.norm("mlp_norm", rows.residual, rows.normed, layer)

    up_input = rows.residual if is_post_norm else rows.normed
    yield reader.linear(sites.up, up_input, rows.inner, activation=architecture.activation)
    yield from _added(reader, sites.down, rows.inner, rows, "post_mlp_norm", layer)
    if is_post_norm:
        yield reader.norm("mlp_norm", rows.residual, rows.residual, layer)


def _added(
    reader: OperationReader[Packed], site: Site, input: int, rows: _Buffers, norm: str, layer: int
) -> Iterator[Operation[Packed]]:
    """Yield residual += linear(input), or += norm(linear(input)) in a family with this norm."""
    if norm in reader.architecture.names:
        yield reader.linear(site, input, rows.normed)
        yield reader.norm(norm, rows.normed, rows.residual, layer, adds=True)
    else:
        yield reader.linear(site, input, rows.residual, adds=True)


def _head(reader: OperationReader[Packed], logits: int) -> Iterator[Operation[Packed]]:
    """Yield the last norm, which not every family has, and the logits."""
    architecture = reader.architecture
    states = _WANTED.residual
    if "norm" in architecture.names:
        states = _WANTED.normed
        yield reader.norm("norm", _WANTED.residual, states)

    yield reader.head(states, logits)
    if architecture.final_softcap is not None:
        yield Cap(logits, architecture.final_softcap)


def adapted(program: Program[Packed], max_rank: int) -> Program[Packed]:
    """Return the program for batches in which rows may have adapters of at most this rank.

    Before each linear stands a Shrink. It writes to one of two new buffers, of all tokens or of
    wanted ones, which stand before that of the logits.
    """
    low_of_all = len(program.widths) - 1
    low_of_wanted = low_of_all + 1
    old_logits = low_of_all
    logits = low_of_wanted + 1

    operations: list[Operation[Packed]] = []
    num_sites = 0
    for operation in program.operations:
        if isinstance(operation, Linear):
            low = low_of_wanted if operation.output in program.wanted else low_of_all
            output = logits if operation.output == old_logits else operation.output
            operations.append(Shrink(operation.input, low, num_sites))
            operation = replace(operation, output=output, site=num_sites, low=low)
            num_sites += 1
        elif isinstance(operation, Cap):
            operation = replace(operation, buffer=logits)

        operations.append(operation)

    low_width = MAX_MODULES * max_rank
    return replace(
        program,
        operations=tuple(operations),
        widths=(*program.widths[:-1], low_width, low_width, program.widths[-1]),
        wanted=program.wanted - {old_logits} | {low_of_wanted, logits},
        num_sites=num_sites,
    )
