"""Products of the native kernels: as exact as torch's, and a row's bits depend on that row only."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from collections.abc import Callable
from ctypes import Structure, byref, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from tests.handlers.lmi_dist.native.builds import variants

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
F32, BF16, INT8 = range(3)
# Inputs that share a scale in INT8
GROUP = 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_RELATIVE_ERROR = 2e-6  # of float32 sums

SIZES = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 191, 192, 193, 256, 390]))
FORMATS = st.sampled_from([F32, BF16, INT8])


class Panels(Structure):
    _fields_ = [(name, c_int32) for name in ("num_out", "num_in", "format", "num_own")] + [
        (name, c_void_p) for name in ("data", "rest")
    ]


class Rows(Structure):
    _fields_ = [
        ("values", c_void_p),
        ("stride", c_int64),
        ("integers", c_void_p),
        ("scales", c_void_p),
        ("pairs", c_void_p),
    ]


def aligned(num_bytes: int) -> Tensor:
    """Bytes at a multiple of 64, which is where 64 bytes of 0xff follow and precede."""
    memory = torch.full((num_bytes + 192,), 0xFF, dtype=torch.uint8)
    start = 64 + -memory.data_ptr() % 64
    return memory[start : start + num_bytes]


class Input:
    """Rows (rows, num_in), as they are, quantised and in pairs. A stride is kept."""

    def __init__(self, library: ctypes.CDLL, x: Tensor) -> None:
        num_rows, num_in = x.shape
        num_groups = -(-num_in // GROUP)
        self.x = x
        self.bytes = torch.zeros(num_rows, num_groups * GROUP, dtype=torch.uint8)
        self.scales = torch.zeros(num_rows, num_groups)
        # Behind a row of pairs may lie what is no number.
        num_numbers = max(-(-x.stride(0) // 2), -(-num_in // 2)) * 2
        self.pairs = torch.full((num_rows, num_numbers), torch.nan, dtype=torch.bfloat16)
        rows = zip(x, self.bytes, self.scales, self.pairs, strict=True)
        for row, bytes_of_row, scales, pairs in rows:
            library.quantize(address(row), num_in, address(bytes_of_row), address(scales))
            library.round_to_pairs(address(row), num_in, address(pairs))

    def __len__(self) -> int:
        return len(self.x)

    def rows(self, first: int = 0) -> Rows:
        """The rows from `first` on."""
        x = self.x[first:]
        bytes_of_rows = self.bytes[first:]
        scales = self.scales[first:]
        pairs = self.pairs[first:]
        return Rows(
            x.data_ptr(),
            x.stride(0),
            bytes_of_rows.data_ptr(),
            scales.data_ptr(),
            pairs.data_ptr(),
        )


@dataclass(frozen=True)
class Packed:
    panels: Panels
    # The memory of the panels
    data: Tensor


@dataclass(frozen=True)
class Products:
    """One build of products.h, with the CPU's 8-bit instructions or plain ones."""

    library: ctypes.CDLL
    is_plain: bool

    def rounds(self, format: int) -> bool:
        """Whether inputs are rounded to bfloat16."""
        return format == BF16 and self.library.way_of_pairs() > 0

    def way(self, format: int) -> int:
        """Builds that go the same way give the same bits."""
        return self.library.way_of_pairs() if format == BF16 else 0

    def pack(self, weight: Tensor, format: int) -> Packed:
        num_out, num_in = weight.shape
        data = aligned(self.library.packed_bytes(num_out, num_in, format))
        self.library.pack(
            address(weight), DTYPES.index(weight.dtype), num_out, num_in, format, address(data)
        )
        return Packed(Panels(num_out, num_in, format, 0, data.data_ptr()), data)

    def input(self, x: Tensor) -> Input:
        return Input(self.library, x)

    def multiply(self, packed: Packed, x: Input, first: int = 0) -> Tensor:
        """The rows from `first` on, at once: (rows, num_out)."""
        num_out = packed.panels.num_out
        num_rows = len(x) - first
        width = self.library.panel_width()
        out = torch.full((-(-num_out // width), num_rows, width), torch.nan)
        self.library.product(
            byref(packed.panels), byref(x.rows(first)), num_rows, self.is_plain, address(out)
        )
        return out.transpose(0, 1).reshape(num_rows, -1)[:, :num_out]

    def multiply_one(self, packed: Packed, x: Input, row: int, count: int) -> Tensor:
        """One row by `count` panels at a time: (1, num_out)."""
        num_out = packed.panels.num_out
        width = self.library.panel_width()
        out = torch.full((1, -(-num_out // width) * width), torch.nan)
        self.library.product_of_one(
            byref(packed.panels), byref(x.rows(row)), count, self.is_plain, address(out)
        )
        return out[:, :num_out]

    def product(self, x: Tensor, weight: Tensor, format: int) -> Tensor:
        return self.multiply(self.pack(weight, format), self.input(x))


def address(x: Tensor) -> c_void_p:
    return c_void_p(x.data_ptr())


def targets() -> list[str]:
    """What this machine can run, in g++'s words. 128-bit vectors are aarch64's; elsewhere only this
    test has them.
    """
    if platform.machine() == "aarch64":
        return ["-march=armv8.2-a"]

    widths = ["-march=x86-64-v2 -mfma", "-march=x86-64-v3"]
    further = {
        "x86-64-v4": "-march=x86-64-v4",
        "x86-64-v4-bf16": "-march=x86-64-v4 -mavx512bf16",
        "x86-64-v4-amx": "-march=x86-64-v4 -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16",
    }
    for variant, flags in further.items():
        if variant in variants():
            widths.append(flags)

    return widths


def build(target: str, path: Path) -> ctypes.CDLL:
    flags = [
        "-std=c++17",
        "-O3",
        "-fPIC",
        "-shared",
        "-fopenmp",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Werror",
    ]
    include = f"-I{ROOT / 'handlers' / 'lmi_dist' / 'native'}"
    subprocess.run(
        ["g++", *flags, *target.split(), include, "-o", path, HERE / "products.cpp"], check=True
    )
    library = ctypes.CDLL(str(path))
    library.packed_bytes.restype = c_int64
    return library


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> list[Products]:
    folder = tmp_path_factory.mktemp("products")
    libraries = [build(target, folder / f"products-{i}.so") for i, target in enumerate(targets())]
    return [Products(library, is_plain) for library in libraries for is_plain in (False, True)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def every(check: Callable[..., None]) -> Callable[..., None]:
    return settings(max_examples=40, deadline=None)(check)


@every
@given(st.integers(1, 40), SIZES, SIZES, st.sampled_from([F32, BF16]), st.sampled_from(DTYPES))
def test_a_product_is_as_exact_as_float32_can_be(
    builds: list[Products],
    num_rows: int,
    num_in: int,
    num_out: int,
    format: int,
    dtype: torch.dtype,
) -> None:
    x = draw(num_rows, num_in)
    weight = draw(num_out, num_in, seed=1).to(dtype)
    rounded = weight.bfloat16() if format == BF16 else weight
    for products in builds:
        inputs = x.bfloat16() if products.rounds(format) else x
        exact = inputs.double() @ rounded.double().T
        size = inputs.double().abs() @ rounded.double().abs().T
        assert (
            (products.product(x, weight, format) - exact).abs() <= MAX_RELATIVE_ERROR * size
        ).all()


def by_group(x: Tensor) -> Tensor:
    """(rows, num_in) -> (rows, groups, GROUP), filled up with zeros."""
    return torch.nn.functional.pad(x.double(), (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


@every
@given(st.integers(1, 40), SIZES, SIZES, st.sampled_from(DTYPES))
def test_a_product_in_8_bits_errs_by_what_rounding_takes(
    builds: list[Products], num_rows: int, num_in: int, num_out: int, dtype: torch.dtype
) -> None:
    x = draw(num_rows, num_in)
    weight = draw(num_out, num_in, seed=1).to(dtype)
    inputs = by_group(x)
    weights = by_group(weight)
    input_error = inputs.abs().amax(-1, keepdim=True).expand_as(inputs) / 127 / 2
    # Of a bfloat16 scale
    weight_error = weights.abs().amax(-1, keepdim=True).expand_as(weights) / 127 / 2 * (1 + 2**-7)
    limit = torch.einsum("rgk,ogk->ro", inputs.abs() + input_error, weights.abs() + weight_error)
    limit -= torch.einsum("rgk,ogk->ro", inputs.abs(), weights.abs())
    exact = x.double() @ weight.double().T
    for products in builds:
        assert ((products.product(x, weight, INT8) - exact).abs() <= limit * (1 + 1e-4)).all()


@every
@given(st.integers(1, 40), SIZES, SIZES, st.randoms(use_true_random=False))
def test_a_product_in_8_bits_is_exact_where_nothing_is_rounded(
    builds: list[Products], num_rows: int, num_in: int, num_out: int, random: Random
) -> None:
    generator = torch.Generator().manual_seed(random.getrandbits(30))

    def integers(num_rows: int) -> Tensor:
        """-127 ... 127, with the largest in each group, times a power of two by row."""
        x = torch.randint(-127, 128, (num_rows, num_in), generator=generator).float()
        x[:, ::GROUP] = torch.tensor([-127.0, 127.0])[
            torch.randint(2, x[:, ::GROUP].shape, generator=generator)
        ]
        return x * 2.0 ** torch.randint(-20, 20, (num_rows, 1), generator=generator)

    x = integers(num_rows)
    weight = integers(num_out)
    for products in builds:
        assert torch.equal(
            products.product(x, weight, INT8).double(), x.double() @ weight.double().T
        )


def test_the_largest_sums_of_8_bits_do_not_overflow(builds: list[Products]) -> None:
    for x in (torch.full((7, 256), 3.0), torch.full((7, 256), -3.0)):
        for weight in (torch.full((40, 256), 2.0), torch.full((40, 256), -2.0)):
            for products in builds:
                torch.testing.assert_close(
                    products.product(x, weight, INT8), x @ weight.T, rtol=2**-6, atol=0
                )


@every
@given(st.integers(1, 40), SIZES, SIZES, FORMATS)
def test_a_row_has_the_same_bits_by_itself_in_any_batch_and_in_every_build(
    builds: list[Products], num_rows: int, num_in: int, num_out: int, format: int
) -> None:
    x = draw(num_rows, num_in)
    weight = draw(num_out, num_in, seed=1)
    expected_by_way: dict[int, Tensor] = {}
    for products in builds:
        packed = products.pack(weight, format)
        input = products.input(x)
        product = bits(products.multiply(packed, input))
        expected = expected_by_way.setdefault(products.way(format), product)
        assert torch.equal(product, expected)

        for row in range(num_rows):
            assert torch.equal(bits(products.multiply(packed, input, row)), expected[row:])
            for count in (1, 2, 3):
                product = products.multiply_one(packed, input, row, count)
                assert torch.equal(bits(product), expected[row : row + 1])


@every
@given(st.integers(1, 40), SIZES, SIZES)
def test_weights_in_bfloat16_give_the_bits_of_the_same_weights_in_float32(
    builds: list[Products], num_rows: int, num_in: int, num_out: int
) -> None:
    x = draw(num_rows, num_in)
    weight = draw(num_out, num_in, seed=1).bfloat16()
    for products in builds:
        if not products.rounds(BF16):
            assert torch.equal(
                bits(products.product(x, weight, BF16)),
                bits(products.product(x, weight.float(), F32)),
            )


@every
@given(st.integers(1, 40), SIZES, SIZES)
def test_where_inputs_are_rounded_they_become_the_nearest_bfloat16(
    builds: list[Products], num_rows: int, num_in: int, num_out: int
) -> None:
    x = draw(num_rows, num_in)
    # A tie, and above the largest
    x[0, 0] = 1.00390625
    x[-1, -1] = 3.4e38
    weight = draw(num_out, num_in, seed=1)
    for products in builds:
        if products.rounds(BF16):
            rounded = x.bfloat16().float()
            assert torch.equal(
                products.product(x, weight, BF16), products.product(rounded, weight, BF16)
            )


def test_rows_may_lie_apart(builds: list[Products]) -> None:
    x = draw(5, 100)[:, :70]
    weight = draw(33, 70, seed=1)
    for products in builds:
        for format in (F32, BF16, INT8):
            assert torch.equal(
                products.product(x, weight, format),
                products.product(x.contiguous(), weight, format),
            )


def test_every_value_of_16_bits_is_packed_exactly(builds: list[Products]) -> None:
    patterns = torch.arange(1 << 16).to(torch.uint16)
    for dtype in (torch.bfloat16, torch.float16):
        values = patterns.view(dtype)
        for products in builds:
            out = products.product(torch.ones(1, 1), values.reshape(-1, 1), F32)[0]
            torch.testing.assert_close(out, values.float(), rtol=0, atol=0, equal_nan=True)


def test_float32_is_rounded_to_the_nearest_bfloat16(builds: list[Products]) -> None:
    weight = draw(5000, 1)
    # Two ties, and above the largest
    weight[:4, 0] = torch.tensor([1.00390625, 1.01171875, 3.4e38, torch.inf])
    for products in builds:
        assert torch.equal(
            products.product(torch.ones(1, 1), weight, BF16)[0], weight[:, 0].bfloat16().float()
        )


@pytest.mark.parametrize(
    "bad", [0x7F800000, -0x00800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1]
)  # infinities, NaN
@pytest.mark.parametrize("format", [F32, BF16, INT8])
def test_a_value_that_is_not_finite_stays_in_its_row_and_its_channel(
    builds: list[Products], format: int, bad: int
) -> None:
    x = draw(20, 100)
    weight = draw(70, 100, seed=1)
    sound_products = [products.product(x, weight, format) for products in builds]
    bits(x)[7, 3] = bits(weight)[11, 5] = bad
    for products, expected in zip(builds, sound_products, strict=True):
        out = products.product(x, weight, format)
        assert not out[7].isfinite().any() and not out[:, 11].isfinite().any()
        assert out.isfinite().sum() == 19 * 69
        assert torch.equal(out[out.isfinite()], expected[out.isfinite()])


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-36, 1e30])
def test_sizes_at_the_ends_of_float32_keep_8_bits_finite(
    builds: list[Products], size: float
) -> None:
    x = draw(5, 100)
    weight = draw(40, 100, seed=1)
    for products in builds:
        for inputs, weights in ((x * size, weight), (x, weight * size)):
            out = products.product(inputs, weights, INT8)
            exact = inputs.double() @ weights.double().T
            assert ((out - exact).abs() <= 5 * max(size, 1e-36)).all()
