"""`scripts/build-native`: it builds what is missing, says what it cannot build, and its sanitizers
find errors.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from handlers.lmi_dist.native_variants import variant_here
from tests.scripts.kernels import SOURCE, build_native, write_source

VARIANTS = {
    "x86_64": ["x86-64-v3", "x86-64-v4", "x86-64-v4-bf16", "x86-64-v4-amx"],
    "aarch64": ["aarch64"],
}[platform.machine()]
RUNTIMES = ("libasan.so", "libubsan.so", "libstdc++.so.6")
WRONG = """
#include <vector>
extern "C" __attribute__((visibility("default"))) int read(int index) { return std::vector<int>(4, 1).data()[index]; }
extern "C" __attribute__((visibility("default"))) int add(int number) { return 0x7fffffff + number; }
"""  # noqa: E501

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    done = build_native("--source", write_source(tmp_path_factory.mktemp("built")))
    assert done.returncode == 0, done.stderr
    return [Path(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sanitized")
    arguments = (
        "--sanitize",
        "--only",
        VARIANTS[0],
        "--source",
        write_source(folder, WRONG),
        "--into",
        folder,
    )
    done = build_native(*arguments)

    assert done.returncode == 0, done.stderr

    return Path(done.stdout.strip())


def python(code: str, *arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100)


def test_each_variant_of_this_machine_is_built_beside_its_source(built: list[Path]) -> None:
    assert [path.name for path in built] == [f"lmi_kernels-{variant}.so" for variant in VARIANTS]
    names = {path.name for path in built[0].parent.iterdir()}
    assert names == {*(library.name for library in built), "lmi_kernels.cpp"}


def test_the_engine_looks_for_a_variant_that_is_built() -> None:
    assert variant_here() in {*VARIANTS, None}


def test_a_library_has_threads_and_needs_no_package_for_them(built: list[Path]) -> None:
    done = python("import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).num_threads(2))", built[0])
    assert (done.stdout, done.stderr) == ("2\n", "")
    assert all(b"libgomp" not in path.read_bytes() for path in built)


def test_what_is_up_to_date_stays_and_needs_no_compiler(built: list[Path]) -> None:
    before = [path.stat().st_mtime_ns for path in built]
    done = build_native("--source", built[0].parent / "lmi_kernels.cpp", CXX="/nowhere/g++")

    assert (done.returncode, done.stderr) == (0, "")
    assert [Path(line) for line in done.stdout.splitlines()] == built
    assert [path.stat().st_mtime_ns for path in built] == before


def test_a_changed_header_is_a_reason_to_build_anew(tmp_path: Path) -> None:
    source = write_source(tmp_path)
    (tmp_path / "tiles.h").write_text("// one\n")
    assert build_native("--only", VARIANTS[0], "--source", source).stderr.count(".so: ") == 1
    (tmp_path / "tiles.h").write_text("// two\n")
    assert build_native("--only", VARIANTS[0], "--source", source).stderr.count(".so: ") == 1


def test_without_a_compiler_one_line_says_what_follows(tmp_path: Path) -> None:
    done = build_native("--source", write_source(tmp_path), PATH="/nowhere")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "no g++ that knows" in line and "needs torch" in line
    assert [path.name for path in tmp_path.iterdir()] == ["lmi_kernels.cpp"]


def test_a_compiler_that_does_not_know_the_instructions_counts_as_none(tmp_path: Path) -> None:
    old = tmp_path / "old-g++"
    old.write_text("#!/bin/sh\necho bad value for -march >&2\nexit 1\n")
    old.chmod(0o755)
    done = build_native("--source", write_source(tmp_path / "native"), CXX=str(old))
    assert done.returncode == 1
    assert f"no {old} that knows" in done.stderr


def test_source_that_does_not_compile_is_an_error_and_leaves_the_last_library(
    tmp_path: Path,
) -> None:
    source = write_source(tmp_path)
    library_path = Path(build_native("--only", VARIANTS[0], "--source", source).stdout.strip())
    before = library_path.read_bytes()
    write_source(tmp_path, SOURCE + "int broken = ;\n")
    done = build_native("--only", VARIANTS[0], "--source", source)
    assert (done.returncode, done.stdout) == (2, "")
    assert "does not compile" in done.stderr and "broken" in done.stderr
    assert library_path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_a_warning_is_an_error_only_for_the_sanitized_library(tmp_path: Path) -> None:
    source = write_source(tmp_path, SOURCE + 'extern "C" int unused(int number) { return 0; }\n')
    for arguments, code in (((), 0), (("--sanitize", "--into", tmp_path), 2)):
        done = build_native("--only", VARIANTS[0], "--source", source, *arguments)
        assert done.returncode == code
        assert "unused parameter" in done.stderr


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("read(3)", None),
        ("read(4)", "heap-buffer-overflow"),
        ("add(0)", None),
        ("add(1)", "signed integer overflow"),
    ],
)
def test_the_sanitized_library_ends_the_process_at_an_error(
    sanitized: Path, call: str, found: str | None
) -> None:
    paths = [
        subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()
        for name in RUNTIMES
    ]
    code = f"import ctypes, sys; ctypes.CDLL(sys.argv[1]).{call}; print('alive')"
    done = python(code, sanitized, LD_PRELOAD=":".join(paths), ASAN_OPTIONS="detect_leaks=0")
    assert (done.returncode == 0, "alive" in done.stdout) == (found is None, found is None)
    assert found is None or found in done.stderr
