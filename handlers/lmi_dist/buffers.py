"""A model that is given as bytes instead of as a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from lmi.errors import ModelUnusable
from lmi.executor.checks import broken


@dataclass(frozen=True, slots=True)
class Buffers:
    """The bytes of one safetensors file, and the text of config.json."""

    engine_buffer: bytes
    json_config_str: str | None

    @contextmanager
    def as_folder(self) -> Iterator[str]:
        """A folder with both as files, for as long as the load lasts. Its errors name the arguments."""
        if self.json_config_str is None:
            raise broken("json_config_str", "the text of config.json", None)
        with TemporaryDirectory(prefix="lmi-model-") as folder:
            weights, config = Path(folder, "model.safetensors"), Path(folder, "config.json")
            weights.write_bytes(self.engine_buffer)
            config.write_text(self.json_config_str, encoding="utf-8")
            try:
                yield folder
            except ModelUnusable as error:
                said = str(error).replace(str(weights), "engine_buffer").replace(str(config), "json_config_str")
                raise ModelUnusable(said.replace(folder, "engine_buffer")) from error
