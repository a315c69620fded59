"""The sites of a decoder's program: its linears as adapters know them, by the modules of transformers.

The program joins what transformers keeps apart: queries, keys and values, or the gate beside its linear. An adapter of
any of these modules changes its rows of the whole. Sites are in the order of the program's linears.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from handlers.lmi_dist.families import Architecture
from handlers.lmi_dist.operations import Cap, Linear, Operation, Packed, Program, Shrink

MAX_MODULES = 3  # of one site


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a module that are rows of the site's weight, or of its gate."""

    first: int  # of the module
    num: int
    row: int  # of the site
    is_gate: bool = False


@dataclass(frozen=True, slots=True)
class Module:
    """A linear of transformers."""

    path: str
    num_in: int
    num_out: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Site:
    num_in: int
    num_out: int
    modules: tuple[Module, ...]  # none: no adapter can change it


def sites_of(architecture: Architecture) -> tuple[Site, ...]:
    a = architecture
    path, shape = a.names["head"], (a.hidden_size, a.vocab_size)
    # The head cannot be changed where its weight is joined with a projection.
    head = Site(*shape, () if "project_out" in a.names else (Module(path, *shape, (Piece(0, a.vocab_size, 0),)),))
    return (*(site for layer in range(a.num_layers) for site in _layer(a, layer)), head)


def adapted(program: Program[Packed], max_rank: int) -> Program[Packed]:
    """The same program for batches in which rows may have adapters of at most this rank.

    A Shrink stands before each linear, and what it writes in two buffers before the last: of all and of wanted rows.
    """
    logits, width = len(program.widths) - 1, MAX_MODULES * max_rank
    operations: list[Operation[Packed]] = []
    num_sites = 0
    for operation in program.operations:
        if isinstance(operation, Linear):
            low = logits + (operation.output in program.wanted)
            operations.append(Shrink(operation.input, low, num_sites))
            output = logits + 2 if operation.output == logits else operation.output
            operation = replace(operation, output=output, site=num_sites, low=low)
            num_sites += 1
        elif isinstance(operation, Cap):
            operation = replace(operation, buffer=logits + 2)
        operations.append(operation)
    return replace(
        program,
        operations=tuple(operations),
        widths=(*program.widths[:-1], width, width, program.widths[-1]),
        wanted=program.wanted - {logits} | {logits + 1, logits + 2},
        num_sites=num_sites,
    )


def _layer(a: Architecture, layer: int) -> Iterator[Site]:
    def module(name: str, num_in: int, *pieces: Piece) -> Module:
        return Module(a.names[name].format(layer), num_in, sum(piece.num for piece in pieces), pieces)

    num_heads, num_keys, inner = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.intermediate_size
    width = num_heads + 2 * num_keys
    qkv = {"q": (num_heads, 0), "k": (num_keys, num_heads), "v": (num_keys, num_heads + num_keys), "qkv": (width, 0)}
    feed_forward = {
        "up": (Piece(0, inner, 0),),
        "gate": (Piece(0, inner, 0, is_gate=True),),
        "gate_up": (Piece(0, inner, 0, is_gate=True), Piece(inner, inner, 0)),
    }
    heads = [module(name, a.hidden_size, Piece(0, num, row)) for name, (num, row) in qkv.items() if name in a.names]
    first = [module(name, a.hidden_size, *pieces) for name, pieces in feed_forward.items() if name in a.names]
    yield Site(a.hidden_size, width, tuple(heads))
    yield Site(num_heads, a.hidden_size, (module("o", num_heads, Piece(0, a.hidden_size, 0)),))
    yield Site(a.hidden_size, inner, tuple(first))
    yield Site(inner, a.hidden_size, (module("down", inner, Piece(0, a.hidden_size, 0)),))
