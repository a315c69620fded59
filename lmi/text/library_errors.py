"""What becomes of the errors and panics of the tokenizers library."""

from collections.abc import Iterator
from contextlib import contextmanager

from lmi.errors import ModelUnusable, cause_line


@contextmanager
def explained(kind: type[Exception], message: str) -> Iterator[None]:
    """Raise an error of ours for one that the library raises in the block, or for its panic.

    It panics at a regular expression that runs away, for example. A panic is a BaseException.
    """
    try:
        yield
    except (TypeError, UnicodeEncodeError, ModelUnusable):
        raise
    except BaseException as error:
        # The class of a panic cannot be imported.
        is_panic = type(error).__name__ == "PanicException"
        if not isinstance(error, Exception) and not is_panic:
            raise

        raise kind(f"{message}: {cause_line(error)}") from error
