"""The linears of a decoder, each with the modules of transformers that it is made of.

A program joins what transformers keeps apart: queries, keys and values are one linear, and so are
the gate and what stands beside it. Such a linear is a site. An adapter, which names modules of
transformers, changes the sites that have them.
"""

from __future__ import annotations

from msgspec import Struct

from handlers.lmi_dist.families import Architecture

# The most modules of one site: queries, keys and values.
MAX_MODULES = 3


class Piece(Struct, frozen=True):
    """Rows of a module's weight that are rows of the site's weight, or of its gate."""

    # The first row in the module, and how many there are.
    first: int
    num: int
    # The first row in the site.
    row: int
    is_gate: bool = False


class Module(Struct, frozen=True):
    """A linear of transformers, by its path in the model."""

    path: str
    num_in: int
    pieces: tuple[Piece, ...]
    has_bias: bool = False

    @property
    def num_out(self) -> int:
        return sum(piece.num for piece in self.pieces)

    @property
    def weight_name(self) -> str:
        """The name of its weight in a whole checkpoint."""
        return f"{self.path}.weight"


class Site(Struct, frozen=True):
    """A linear of the program: a weight (num_out, num_in), and perhaps a gate of the same shape."""

    num_in: int
    num_out: int
    # Empty where no adapter can change it.
    modules: tuple[Module, ...]


class LayerSites(Struct, frozen=True):
    """The sites of one layer, in the order in which a step computes them."""

    qkv: Site
    output: Site
    # The first linear of the feed-forward, with its gate.
    up: Site
    down: Site


def sites_of(architecture: Architecture) -> tuple[Site, ...]:
    """Return all sites of a decoder, in the order in which a step computes them."""
    sites: list[Site] = []
    for layer in range(architecture.num_layers):
        of_layer = sites_of_layer(architecture, layer)
        sites += (of_layer.qkv, of_layer.output, of_layer.up, of_layer.down)

    sites.append(_head_site(architecture))
    return tuple(sites)


def sites_of_layer(architecture: Architecture, layer: int) -> LayerSites:
    """Return the sites of a layer, by the parts that the family has names for."""
    num_queries, num_keys, num_values = qkv_widths(architecture)
    num_qkv = num_queries + num_keys + num_values
    hidden_size = architecture.hidden_size
    inner_size = architecture.intermediate_size

    def site(num_in: int, num_out: int, pieces_of_parts: dict[str, list[Piece]]) -> Site:
        modules: list[Module] = []
        for part, pieces in pieces_of_parts.items():
            if part in architecture.names:
                path = architecture.names[part].format(layer)
                has_bias = part in architecture.biases
                modules.append(Module(path, num_in, tuple(pieces), has_bias))

        return Site(num_in, num_out, tuple(modules))

    # A family has either q, k and v, or qkv.
    qkv_pieces = {
        "q": [Piece(0, num_queries, 0)],
        "k": [Piece(0, num_keys, num_queries)],
        "v": [Piece(0, num_values, num_queries + num_keys)],
        "qkv": [Piece(0, num_qkv, 0)],
    }
    # And either up, perhaps with gate, or gate_up, whose first half is the gate.
    gate = Piece(0, inner_size, 0, is_gate=True)
    up_pieces = {
        "up": [Piece(0, inner_size, 0)],
        "gate": [gate],
        "gate_up": [gate, Piece(inner_size, inner_size, 0)],
    }

    return LayerSites(
        qkv=site(hidden_size, num_qkv, qkv_pieces),
        output=site(num_queries, hidden_size, {"o": [Piece(0, hidden_size, 0)]}),
        up=site(hidden_size, inner_size, up_pieces),
        down=site(inner_size, hidden_size, {"down": [Piece(0, hidden_size, 0)]}),
    )


def _head_site(architecture: Architecture) -> Site:
    """Return the site of the head. It cannot be changed where it is joined with a projection."""
    hidden_size = architecture.hidden_size
    vocab_size = architecture.vocab_size
    modules: tuple[Module, ...] = ()
    if "project_out" not in architecture.names:
        piece = Piece(0, vocab_size, 0)
        modules = (Module(architecture.names["head"], hidden_size, (piece,)),)

    return Site(hidden_size, vocab_size, modules)


def qkv_widths(architecture: Architecture) -> tuple[int, int, int]:
    """Return the numbers of channels of all queries, of all keys and of all values."""
    num_queries = architecture.num_heads * architecture.head_dim
    num_keys = architecture.num_kv_heads * architecture.head_dim
    return num_queries, num_keys, num_keys
