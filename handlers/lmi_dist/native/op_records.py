"""The record of an operation, as `lmi_kernels.h` describes it."""

from __future__ import annotations

import ctypes
from enum import IntEnum

from handlers.lmi_dist.native.records import DTYPE_NUMBERS, OpRecord, Panels, address_or_null
from handlers.lmi_dist.operations import (
    Attend,
    Cap,
    Embed,
    Gather,
    Linear,
    Norm,
    Operation,
    Shrink,
)


class OperationKind(IntEnum):
    """The kinds of operations, as the header numbers them."""

    EMBED = 0
    NORM = 1
    LINEAR = 2
    ATTEND = 3
    GATHER = 4
    CAP = 5
    SHRINK = 6


# The site of an operation that belongs to none.
NO_SITE = 0
ACTIVATION_NUMBERS = {
    "none": 0,
    "silu": 1,
    "relu": 2,
    "gelu": 3,
    "gelu_tanh": 4,
}


def record_of(operation: Operation[Panels]) -> OpRecord:
    """Return the record of an operation.

    It has the addresses of the operation's arrays, which the caller must keep. It keeps the panels
    itself.
    """
    match operation:
        case Embed():
            return _embed(operation)
        case Norm():
            return _norm(operation)
        case Linear():
            return _linear(operation)
        case Attend():
            return _attend(operation)
        case Shrink():
            return _shrink(operation)
        case Gather():
            return _gather(operation)
        case Cap():
            return _cap(operation)


def _embed(embed: Embed) -> OpRecord:
    record = OpRecord(
        kind=OperationKind.EMBED,
        output=embed.output,
        scale=embed.scale,
        positions=address_or_null(embed.positions),
    )
    if isinstance(embed.table, Panels):
        record.weight = ctypes.pointer(embed.table)
    else:
        record.table_dtype = DTYPE_NUMBERS[embed.table.dtype]
        record.table = address_or_null(embed.table)

    return record


def _norm(norm: Norm) -> OpRecord:
    return OpRecord(
        kind=OperationKind.NORM,
        input=norm.input,
        output=norm.output,
        adds=norm.adds,
        is_centred=norm.is_centred,
        eps=norm.eps,
        norm=address_or_null(norm.weight),
        bias=address_or_null(norm.bias),
    )


def _linear(linear: Linear[Panels]) -> OpRecord:
    record = OpRecord(
        kind=OperationKind.LINEAR,
        input=linear.input,
        output=linear.output,
        # Whether the result is added to what the output has.
        adds=linear.adds,
        activation=ACTIVATION_NUMBERS[linear.activation],
        # The buffer that the Shrink of its site wrote.
        low=linear.low,
        weight=ctypes.pointer(linear.weight),
        bias=address_or_null(linear.bias),
        gate_bias=address_or_null(linear.gate_bias),
    )

    # A pointer that is not set is null.
    if linear.gate is not None:
        record.gate = ctypes.pointer(linear.gate)

    record.site = _site_number(linear.site)
    return record


def _attend(attend: Attend) -> OpRecord:
    num_pairs = 0
    if attend.rotations is not None:
        num_pairs = attend.rotations.shape[2]

    return OpRecord(
        kind=OperationKind.ATTEND,
        input=attend.input,
        output=attend.output,
        layer=attend.layer,
        window=attend.window or 0,
        num_pairs=num_pairs,
        is_wanted=attend.is_wanted,
        eps=attend.norm_eps,
        scale=attend.scale,
        cap=attend.softcap or 0.0,
        rotations=address_or_null(attend.rotations),
        query_norm=address_or_null(attend.query_norm),
        key_norm=address_or_null(attend.key_norm),
    )


def _shrink(shrink: Shrink) -> OpRecord:
    return OpRecord(
        kind=OperationKind.SHRINK,
        input=shrink.input,
        output=shrink.output,
        site=_site_number(shrink.site),
    )


def _gather(gather: Gather) -> OpRecord:
    return OpRecord(kind=OperationKind.GATHER, input=gather.input, output=gather.output)


def _cap(cap: Cap) -> OpRecord:
    return OpRecord(kind=OperationKind.CAP, input=cap.buffer, output=cap.buffer, cap=cap.cap)


def _site_number(site: int | None) -> int:
    """Return the number of a site in a record, where sites count from 1."""
    return NO_SITE if site is None else site + 1
