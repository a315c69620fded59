"""What `quantization_config` of config.json says of a checkpoint's weights, and what of it is read
here.

It imports none of the engine's libraries. Sources: the configurations that AutoAWQ, GPTQModel and
compressed-tensors write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from msgspec import Struct

from lmi.errors import ModelUnusable, shorten

KEY = "quantization_config"
# More inputs than a weight has.
MAX_GROUP_SIZE = 1 << 20


class Layout(Enum):
    """How a checkpoint keeps a quantised weight, by the name that its maker has for it."""

    AWQ = "gemm"
    GPTQ = "gptq"
    GPTQ_V2 = "gptq_v2"
    PACKED = "pack-quantized"
    INTEGERS = "int-quantized"


GPTQ_LAYOUTS = ("gptq", "gptq_v2")
COMPRESSED_LAYOUTS = ("pack-quantized", "int-quantized")


class Scheme(Struct, frozen=True):
    """How the quantised weights of a checkpoint are kept."""

    layout: Layout
    num_bits: int
    # The inputs that share a scale. None: all of a row.
    group_size: int | None
    # Whether one scale is that of the whole weight.
    is_of_tensor: bool = False
    has_zero_points: bool = True
    # Whether a tensor says of each input in which group it is.
    has_order: bool = False

    def num_groups(self, num_in: int) -> int:
        """Return the number of groups of a row of `num_in` weights."""
        return 1 if self.group_size is None else -(-num_in // self.group_size)


def read_scheme(file: Path, config: Mapping[str, Any]) -> Scheme | None:
    """Return how the weights of a model are quantised, by its config.json, or None if they are not.

    Raises ModelUnusable with one line for what is wrong or not read here.
    """
    quantization = config.get(KEY)
    if not isinstance(quantization, dict):
        return None

    method = quantization.get("quant_method")
    read = _READERS.get(method) if isinstance(method, str) else None
    if read is None:
        raise refused(file, shorten(method))

    return read(_Fields(file, quantization))


def refused(file: Path, what: str) -> ModelUnusable:
    """Return the error for weights that are quantised in a way that is not read here."""
    return ModelUnusable(
        f"{file}: its weights are quantised already ({KEY}: {what}), "
        "which lmi-dist does not read; option.rolling_batch=vllm does"
    )


class _Fields:
    """An object in `quantization_config`."""

    def __init__(self, file: Path, values: Mapping[str, Any], path: str = KEY) -> None:
        self.file = file
        self._values = values
        self._path = path

    def get(self, *names: str) -> Any:
        """Return the first of these fields that is there and not null, or None."""
        for name in names:
            value = self._values.get(name)
            if value is not None:
                return value

        return None

    def names(self) -> list[str]:
        return list(self._values)

    def broken(self, name: str, rule: str) -> ModelUnusable:
        """Return the error for a field that breaks a rule."""
        given = shorten(self._values.get(name))
        return ModelUnusable(f"{self.file}: {self._path}.{name} must be {rule}, given {given}")

    def child(self, name: str) -> _Fields:
        """Return the object in a field, empty where there is none."""
        value = self.get(name)
        if value is None:
            value = {}

        if not isinstance(value, dict):
            raise self.broken(name, "an object")

        return _Fields(self.file, value, f"{self._path}.{name}")

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default

        if not isinstance(value, bool):
            raise self.broken(name, "true or false")

        return value

    def text(self, *names: str, default: str) -> str:
        """Return the first of these fields in small letters."""
        value = self.get(*names)
        if value is None:
            return default

        if not isinstance(value, str):
            raise self.broken(self._first_of(names), "a text")

        return value.lower()

    def num_bits(self, *names: str, allowed: tuple[int, ...], method: str) -> int:
        """Return a number of bits that is allowed; others are not read here."""
        value = self.get(*names)
        if type(value) is not int:
            raise self.broken(self._first_of(names), "a whole number")

        if value not in allowed:
            raise refused(self.file, f"{method} of {shorten(value)} bits")

        return value

    def group_size(self, *names: str) -> int | None:
        """Return how many inputs share a scale, or None for -1: all of a row."""
        value = self.get(*names)
        if value == -1 and type(value) is int:
            return None

        if type(value) is not int or not 1 <= value <= MAX_GROUP_SIZE:
            rule = f"-1 or a whole number from 1 to {MAX_GROUP_SIZE}"
            raise self.broken(self._first_of(names), rule)

        return value

    def _first_of(self, names: tuple[str, ...]) -> str:
        """Return the name of these that is there, for a message."""
        for name in names:
            if self._values.get(name) is not None:
                return name

        return names[0]


def _awq(fields: _Fields) -> Scheme:
    version = fields.text("version", "format", default="gemm")
    if version != Layout.AWQ.value:
        raise refused(fields.file, f"awq, version {shorten(version)}")

    num_bits = fields.num_bits("bits", "w_bit", allowed=(4,), method="awq")
    return Scheme(Layout.AWQ, num_bits, fields.group_size("group_size", "q_group_size"))


def _gptq(fields: _Fields) -> Scheme:
    layout = fields.text("checkpoint_format", "format", default="gptq")
    if fields.flag("is_marlin_format", default=False):
        layout = "marlin"

    if layout not in GPTQ_LAYOUTS:
        raise refused(fields.file, f"gptq, checkpoint_format {shorten(layout)}")

    pack_dtype = fields.text("pack_dtype", default="int32")
    if pack_dtype != "int32":
        raise refused(fields.file, f"gptq, pack_dtype {shorten(pack_dtype)}")

    if fields.get("adapter") is not None:
        raise refused(fields.file, "gptq with an adapter")

    # A pattern with this beginning names modules that stay floats; others have bits of their own.
    changed = [name for name in fields.child("dynamic").names() if not name.startswith("-:")]
    if changed:
        raise refused(fields.file, f"gptq, dynamic {shorten(changed[0])}")

    return Scheme(
        Layout(layout),
        fields.num_bits("bits", allowed=(4, 8), method="gptq"),
        fields.group_size("group_size"),
        has_order=fields.flag("desc_act", default=False),
    )


def _compressed(fields: _Fields) -> Scheme:
    layout = fields.text("format", default="none")
    if layout not in COMPRESSED_LAYOUTS:
        raise refused(fields.file, f"compressed-tensors, format {shorten(layout)}")

    status = fields.text("quantization_status", default="compressed")
    if status != "compressed":
        raise refused(fields.file, f"compressed-tensors, quantization_status {shorten(status)}")

    sparsity = fields.child("sparsity_config").text("format", default="dense")
    if sparsity != "dense":
        raise refused(fields.file, f"compressed-tensors, sparsity_config {shorten(sparsity)}")

    if fields.child("transform_config").child("config_groups").names():
        raise refused(fields.file, "compressed-tensors with a transform_config")

    groups = fields.child("config_groups")
    schemes: list[Scheme] = []
    for name in groups.names():
        group = groups.child(name)
        layout_of_group = group.text("format", default=layout)
        if layout_of_group != layout:
            raise refused(fields.file, f"compressed-tensors, format {shorten(layout_of_group)}")

        schemes.append(_scheme_of_group(group.child("weights"), Layout(layout)))

    if not schemes:
        raise fields.broken("config_groups", "an object with a group")

    if any(scheme != schemes[0] for scheme in schemes):
        raise refused(fields.file, "compressed-tensors, config_groups of different weights")

    return schemes[0]


def _scheme_of_group(weights: _Fields, layout: Layout) -> Scheme:
    kind = weights.text("type", default="int")
    if kind != "int":
        raise refused(weights.file, f"compressed-tensors, weights of type {shorten(kind)}")

    strategy = weights.text("strategy", default=_usual_strategy(weights))
    group_size = None
    if strategy == "group":
        group_size = weights.group_size("group_size")
    elif strategy not in _strategies(layout):
        raise refused(weights.file, f"compressed-tensors, strategy {shorten(strategy)}")

    return Scheme(
        layout,
        weights.num_bits("num_bits", allowed=(4, 8), method="compressed-tensors"),
        group_size,
        is_of_tensor=strategy == "tensor",
        has_zero_points=not weights.flag("symmetric", default=True),
        has_order=weights.get("actorder") in (True, "group", "dynamic"),
    )


def _usual_strategy(weights: _Fields) -> str:
    """Return the strategy of weights that name none."""
    if weights.get("group_size") is None:
        return "tensor"

    return "channel" if weights.get("group_size") == -1 else "group"


def _strategies(layout: Layout) -> tuple[str, ...]:
    """Return the strategies without groups. Packed weights have no scale of a whole tensor here."""
    return ("channel",) if layout is Layout.PACKED else ("channel", "tensor")


_READERS: dict[str, Callable[[_Fields], Scheme]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
}
