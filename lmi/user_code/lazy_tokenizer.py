"""The model's tokenizer for user code, loaded when the code first uses it.

Most formatters take a tokenizer and do not use it, and transformers takes seconds to import and imports torch.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any


class LazyTokenizer:
    """Replaces transformers' tokenizer of a model folder. The first use raises the exceptions of loading it."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._folder)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look for such names on this object
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._tokenizer(*args, **named)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __bool__(self) -> bool:
        return True
