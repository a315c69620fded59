"""The quantised weights of a checkpoint by the names of transformers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from handlers.lmi_dist.arrays import Array
from handlers.lmi_dist.quantised import awq, compressed, gptq
from handlers.lmi_dist.quantised.parts import Parts
from handlers.lmi_dist.quantised.scheme import Layout, Scheme
from handlers.lmi_dist.quantised.weight import QuantisedWeight


class _LayoutReader(NamedTuple):
    """What reads the weights of a layout."""

    read: Callable[[Parts, Scheme], QuantisedWeight]
    # The last words in the names of tensors that only a quantised weight has.
    own_words: tuple[str, ...]
    # The last words in the names of others that belong to it.
    further_words: tuple[str, ...] = ()


_LAYOUTS = {
    Layout.AWQ: _LayoutReader(awq.read, awq.PARTS),
    Layout.GPTQ: _LayoutReader(gptq.read, gptq.PARTS),
    Layout.GPTQ_V2: _LayoutReader(gptq.read, gptq.PARTS),
    Layout.PACKED: _LayoutReader(
        compressed.read_packed,
        compressed.PACKED_PARTS,
        compressed.OF_ACTIVATIONS,
    ),
    Layout.INTEGERS: _LayoutReader(
        compressed.read_integers,
        compressed.OF_INTEGERS,
        ("weight", *compressed.OF_ACTIVATIONS),
    ),
}


class QuantisedTensors(Mapping[str, QuantisedWeight]):
    """The quantised weights of a checkpoint, such as `model.layers.0.mlp.up_proj.weight`.

    A weight is one if any of its parts is there. It is read when it is asked for: its scales and
    zero points at once, its numbers later.
    """

    def __init__(
        self, scheme: Scheme | None, names: Collection[str], read: Callable[[str], Array]
    ) -> None:
        """`names` are those of all tensors of the checkpoint; `read` reads one of them. Without a
        scheme no weight is quantised.
        """
        self._read_weight: Callable[[str], QuantisedWeight]
        self._names: dict[str, dict[str, str]] = {}
        if scheme is None:
            return

        layout = _LAYOUTS[scheme.layout]
        self._names = _names_by_weight(layout, names)
        self._read_weight = lambda name: layout.read(Parts(self._names[name], read), scheme)

    def __getitem__(self, name: str) -> QuantisedWeight:
        """Raises ValueError for parts that do not fit together."""
        if name not in self._names:
            raise KeyError(name)

        return self._read_weight(name)

    def parts_of(self, name: str) -> Iterable[str]:
        """Return the names of the tensors that make up a weight, none if it is not quantised."""
        return self._names.get(name, {}).values()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _names_by_weight(layout: _LayoutReader, names: Collection[str]) -> dict[str, dict[str, str]]:
    """Return, for each quantised weight, the names of its tensors by their last word."""
    names_by_path: dict[str, dict[str, str]] = {}
    for name in names:
        path, last_word = _split(name)
        if last_word in layout.own_words:
            names_by_path.setdefault(path, {})[last_word] = name

    for path, names_by_word in names_by_path.items():
        for last_word in layout.further_words:
            name = f"{path}.{last_word}"
            if name in names:
                names_by_word[last_word] = name

    return {f"{path}.weight": names_by_word for path, names_by_word in names_by_path.items()}


def _split(name: str) -> tuple[str, str]:
    """Return the path of a tensor's module, and the last word of its name."""
    path, _, last_word = name.rpartition(".")
    return path, last_word
