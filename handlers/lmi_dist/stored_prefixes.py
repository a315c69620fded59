"""The full blocks of the tree, kept on disk too: they come back after a restart or an eviction.

A block goes by its digest, which is made of all that its keys and values depend on: the model, its
kernels, the adapter and the tokens from the first on. The salt that keeps requests apart is part of
it too.
"""

from __future__ import annotations

import logging
from array import array
from hashlib import file_digest, sha256
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from handlers.lmi_dist.arrays import Array
from handlers.lmi_dist.block_files import BlockFiles
from handlers.lmi_dist.cached_blocks import Root, Tokens
from handlers.lmi_dist.native.records import Panels
from handlers.lmi_dist.operations import Adapter
from handlers.lmi_dist.weights import Checkpoint
from lmi import __version__
from lmi.errors import BadConfiguration, error_line
from lmi.settings.config import EngineConfig
from lmi.shared.gguf_file import SUFFIX as GGUF_SUFFIX

KEY = "option.prefix_cache_dir"

log = logging.getLogger(__name__)


class BlockName(NamedTuple):
    """What the disk knows a full block by, and its place in its sequence."""

    digest: bytes
    place: int


class ModelBlocks(Protocol):
    """The blocks and adapters of a model."""

    block_bytes: int

    def block(self, number: int) -> Array:
        """Return the keys and values of a block as bytes, (block_bytes,), not copied."""

    def adapter(self, number: int) -> Adapter[Panels]:
        """Return an adapter that the model has."""


class StoredPrefixes:
    """What the tree has, and what it had. It is told of blocks as routers are."""

    def __init__(self, files: BlockFiles, model: ModelBlocks) -> None:
        self._files = files
        self._model = model
        # By block. Where a block is missing, all below it are.
        self._names: dict[int, BlockName] = {}
        # By the number of an adapter.
        self._adapters: dict[int, bytes] = {}

    def store(self, root: Root, parent: int | None, tokens: Tokens, block: int) -> None:
        """Write a full block that came into the tree below its parent, or as the first one.

        It is left out if the disk is too slow, or its parent was.
        """
        name = self._name(root, parent, tokens)
        if name is None:
            return

        content = self._model.block(block)
        if self._files.has(name.digest) or self._files.write(name.digest, name.place, content):
            self._names[block] = name

    def remove(self, block: int) -> None:
        """Note that the tree has forgotten a block. The disk keeps it."""
        self._names.pop(block, None)

    def has(self, root: Root, parent: int | None, tokens: Tokens) -> bool:
        """Whether the disk has the block with these tokens below a block of the tree."""
        name = self._name(root, parent, tokens)
        return name is not None and self._files.has(name.digest)

    def read(self, root: Root, parent: int | None, tokens: Tokens, block: int) -> bool:
        """Read the block with these tokens into a block of the cache. Returns False if there is
        none.
        """
        name = self._name(root, parent, tokens)
        if name is None:
            return False

        return self._files.read(name.digest, name.place, self._model.block(block))

    def close(self) -> None:
        """Write what is not written yet."""
        self._files.close()

    def _name(self, root: Root, parent: int | None, tokens: Tokens) -> BlockName | None:
        """Return the name of the full block with these tokens, or None if its parent has none."""
        if parent is None:
            before = self._digest_of_root(root)
            place = 0
        elif parent in self._names:
            before = self._names[parent].digest
            place = self._names[parent].place + 1
        else:
            return None

        digest = sha256(before)
        digest.update(array("i", tokens).tobytes())
        return BlockName(digest.digest(), place)

    def _digest_of_root(self, root: Root) -> bytes:
        digest = sha256()
        if root.adapter:
            if root.adapter not in self._adapters:
                self._adapters[root.adapter] = digest_of_adapter(self._model.adapter(root.adapter))

            digest.update(self._adapters[root.adapter])

        if root.cache_salt is not None:
            digest.update(b"salt" + root.cache_salt.encode(errors="surrogatepass"))

        return digest.digest()


def open_prefixes(
    config: EngineConfig, folder: str, max_length: int, library: Path, model: ModelBlocks
) -> StoredPrefixes:
    """Return the blocks that `option.prefix_cache_dir` keeps for the model in a folder.

    `max_length` is the longest sequence, and `library` the file of the kernels. Raises
    BadConfiguration if it cannot.
    """
    assert config.prefix_cache_dir is not None
    digest = digest_of_model(config, folder, max_length, library)
    try:
        files = BlockFiles(config.prefix_cache_dir, digest, config.max_prefix_cache_disk)
        num_blocks = len(files)
    except OSError as error:
        raise BadConfiguration(f"{KEY}={config.prefix_cache_dir}: {error_line(error)}") from error

    log.info(
        "%s has %d blocks of prompts of this model, %d MB",
        config.prefix_cache_dir,
        num_blocks,
        num_blocks * model.block_bytes // 1_000_000,
    )
    return StoredPrefixes(files, model)


def digest_of_model(config: EngineConfig, folder: str, max_length: int, library: Path) -> bytes:
    """Return the digest of all that keys and values depend on beside tokens and adapters.

    It reads the weights once more, about a gigabyte in a second.
    """
    settings = [__version__, config.dtype, config.quantize, max_length]
    digest = sha256(msgspec.json.encode(settings))

    checkpoint = Checkpoint(folder, allow_pickle=config.allow_pickle)
    # A file of a split model stands for all of them.
    weights = {*checkpoint.files.values(), *checkpoint.folder.glob(f"*{GGUF_SUFFIX}")}
    config_file = checkpoint.folder / "config.json"
    for path in (library, config_file, *sorted(weights)):
        with open(path, "rb") as file:
            digest.update(file_digest(file, "sha256").digest())

    return digest.digest()


def digest_of_adapter(adapter: Adapter[Panels]) -> bytes:
    """Return the digest of the weights of an adapter, as the kernels read them."""
    digest = sha256()
    for site, low in enumerate(adapter):
        if low is None:
            continue

        for part, panels in enumerate((low.down, low.up, low.gate)):
            if panels is not None:
                shape = array("i", (site, part, panels.num_out, panels.num_in))
                digest.update(shape.tobytes())
                digest.update(panels.memory.data)

    return digest.digest()
