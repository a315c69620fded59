"""The options that variables of AWS's images for other servers give."""

from collections.abc import Iterator, Mapping

from lmi.settings import engine_flags, llama_cpp, sglang
from lmi.settings.given import Given

READERS = (llama_cpp, engine_flags, sglang)


def givens(environ: Mapping[str, str]) -> Iterator[Given]:
    """Yield the values that variables of all these images give to options."""
    for reader in READERS:
        yield from reader.givens(environ)
