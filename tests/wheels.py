"""Small wheels and an index of them in files, so that pip has real work and needs no network."""

from __future__ import annotations

import zipfile
from pathlib import Path

WHEEL = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def write_wheel(folder: Path, name: str, version: str = "1.0", requires: str = "") -> Path:
    """Write a wheel of one module, which has the version as VERSION. `requires`: a package that it
    needs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    content = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": WHEEL,
    }
    with zipfile.ZipFile(file, "w") as wheel:
        for path, text in content.items():
            wheel.writestr(path, text)

        wheel.writestr(
            f"{info}/RECORD", "".join(f"{path},,\n" for path in (*content, f"{info}/RECORD"))
        )

    return file


def write_index(folder: Path, *wheels: Path) -> str:
    """Write the pages of an index of these wheels. Returns its address for PIP_INDEX_URL."""
    for wheel in wheels:
        page = folder / wheel.name.partition("-")[0] / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(
            f'<!DOCTYPE html><html><body><a href="{wheel.as_uri()}">{wheel.name}</a></body></html>'
        )

    folder.mkdir(parents=True, exist_ok=True)
    return folder.as_uri()


def snapshot(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """The mode, the time of the last change and the content of a folder and of
    everything below it.
    """
    files_found = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        files_found[str(path.relative_to(folder))] = (status.st_mode, status.st_mtime_ns, content)

    return files_found
