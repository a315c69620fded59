"""The wheel and the source package: where there is a compiler, it carries the native kernels of its
platform.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.scripts.kernels import ROOT, write_source

CARRIED = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    ".gitignore",
    "scripts/build-native",
    "scripts/wheel_hook.py",
)
NATIVE = "handlers/lmi_dist/native"
spec = importlib.util.spec_from_file_location("wheel_hook", ROOT / "scripts" / "wheel_hook.py")
assert spec is not None and spec.loader is not None
wheel_hook = importlib.util.module_from_spec(spec)
spec.loader.exec_module(wheel_hook)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what a build reads, with a small library for the kernels."""
    folder = tmp_path / "tree"
    for name in CARRIED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)

    for package in ("lmi", "handlers"):
        shutil.copytree(
            ROOT / package,
            folder / package,
            ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.h"),
        )

    write_source(folder / NATIVE)
    return folder


def build(tree: Path, kind: str = "wheel", **environ: str) -> Path:
    code = (
        f"import sys; from hatchling.build import build_{kind} as build; print(build(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(tree.parent)]
    done = subprocess.run(
        command, cwd=tree, env=os.environ | environ, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return tree.parent / done.stdout.split()[-1]


def libraries(wheel: Path) -> list[str]:
    return [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


def is_for_this_platform(wheel: Path) -> bool:
    return (
        wheel.name.startswith("lmi-")
        and wheel.name.endswith(f"_{platform.machine()}.whl")
        and "-manylinux_" in wheel.name
    )


@needs_compiler
def test_the_wheel_has_the_kernels_and_only_pip_is_needed_to_install_it(tree: Path) -> None:
    wheel = build(tree)
    assert is_for_this_platform(wheel)
    assert libraries(wheel) and all(
        name.startswith(f"{NATIVE}/lmi_kernels-") for name in libraries(wheel)
    )

    target = tree.parent / "installed"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        f"--target={target}",
        str(wheel),
    ]
    subprocess.run(pip, env=os.environ | {"PATH": "/nowhere"}, check=True, timeout=100)

    assert sorted(str(path.relative_to(target)) for path in target.rglob("*.so")) == sorted(
        libraries(wheel)
    )


def test_without_a_compiler_the_wheel_is_for_every_platform_and_has_no_kernels(tree: Path) -> None:
    wheel = build(tree, PATH="/nowhere")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert libraries(wheel) == []


def test_kernels_that_do_not_compile_are_no_wheel(tree: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no compiler")

    write_source(tree / NATIVE, "int broken = ;\n")
    with pytest.raises(AssertionError, match="the native kernels do not compile"):
        build(tree)


@needs_compiler
def test_the_source_package_has_no_library_and_makes_the_same_wheel(tree: Path) -> None:
    wheel = build(tree)
    package = build(tree, "sdist")
    with tarfile.open(package) as archive:
        names = archive.getnames()
        archive.extractall(tree.parent / "unpacked", filter="data")

    assert not any(name.endswith(".so") for name in names)

    (unpacked,) = (tree.parent / "unpacked").iterdir()
    again = build(unpacked)

    assert again.name == wheel.name
    assert libraries(again) == libraries(wheel)


def test_an_editable_install_builds_nothing(tree: Path) -> None:
    wheel = build(tree, "editable", CXX="/nowhere/g++")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert list(tree.rglob("*.so")) == []


@pytest.mark.parametrize(
    ("symbols", "minor"),
    [
        (b"", 28),
        (b"GLIBC_2.2.5\0GLIBC_2.17", 28),
        (b"GLIBC_2.34\0GLIBC_2.4", 34),
        (b"GLIBCXX_3.4\0GLIBCXX_3.4.21", 28),
        (b"GLIBCXX_3.4.30\0GLIBC_2.34", 35),
    ],
)
def test_the_platform_of_a_wheel_has_every_symbol_that_the_kernels_name(
    symbols: bytes, minor: int
) -> None:
    assert wheel_hook.platform_tag([b"", symbols]) == f"manylinux_2_{minor}_{platform.machine()}"


def test_symbols_of_an_unknown_platform_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"GLIBCXX_3\.4\.99"):
        wheel_hook.platform_tag([b"GLIBCXX_3.4.99"])
