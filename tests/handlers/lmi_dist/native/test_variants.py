"""Which variants of the native library are built, and which one a CPU takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from handlers.lmi_dist.native_variants import (
    X86_64_V3,
    X86_64_V4,
    X86_64_V4_AMX,
    X86_64_V4_BF16,
    describe_kernels,
    library_file,
    variant_of,
)


@pytest.mark.parametrize(
    ("machine", "flags", "variant"),
    [
        ("x86_64", X86_64_V4_AMX, "x86-64-v4-amx"),
        ("x86_64", X86_64_V4_AMX - {"amx_tile"}, "x86-64-v4-bf16"),
        ("x86_64", X86_64_V4_BF16 | {"amx_tile"}, "x86-64-v4-bf16"),
        ("x86_64", X86_64_V4 | {"avx_vnni"}, "x86-64-v4"),
        ("x86_64", X86_64_V4_BF16 - {"avx512vl"}, "x86-64-v3"),
        ("x86_64", X86_64_V4 - {"avx512vl"}, "x86-64-v3"),
        ("x86_64", X86_64_V3, "x86-64-v3"),
        ("x86_64", X86_64_V3 - {"fma"}, None),
        ("x86_64", frozenset(), None),
        ("aarch64", frozenset(), "aarch64"),
        ("riscv64", X86_64_V4, None),
    ],
)
def test_a_cpu_takes_the_best_variant_whose_every_feature_it_has(
    machine: str, flags: frozenset[str], variant: str | None
) -> None:
    assert variant_of(machine, flags) == variant


def test_what_is_told_names_the_variants_that_are_built_and_what_computes(tmp_path: Path) -> None:
    assert (
        describe_kernels(tmp_path, "x86-64-v4")
        == "kernels torch (built: none; this CPU: x86-64-v4)"
    )

    library_file("x86-64-v3", tmp_path).touch()
    assert (
        describe_kernels(tmp_path, "x86-64-v4")
        == "kernels torch (built: x86-64-v3; this CPU: x86-64-v4)"
    )

    library_file("x86-64-v4", tmp_path).touch()
    assert (
        describe_kernels(tmp_path, "x86-64-v4")
        == "kernels native x86-64-v4 (built: x86-64-v3, x86-64-v4)"
    )
    assert describe_kernels(tmp_path, "aarch64").startswith(
        "kernels torch (built: x86-64-v3, x86-64-v4;"
    )
