"""The prompts of chats: the model's template writes them, and what content spells of special tokens
stays text.

A special token, such as `<|im_start|>`, is a template's to write; in content it would forge a role.
So content is marked before the template renders it: a character that no text should have breaks
each spelling, also one that two contents spell together. The marks of the rendered text show the
tokenizer which spellings it should encode as text.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from lmi.errors import InvalidParameter, ModelUnusable
from lmi.settings.chat_templates import find_templates
from lmi.settings.config import ModelConfig
from lmi.text.tokenizer import Tokenizer
from lmi.types import Chat

# one of Unicode's noncharacters; content that has it nevertheless has two for one while it is
# marked
MARK = "\ufdd0"
MARKS = re.compile(f"{MARK}{MARK}?")
MAX_SPECIAL_CHARS = 256
NUM_LOOKED_AT = 4  # characters of a special token, by which a pattern finds where one may begin


class ChatPrompts:
    """Writes the prompts of one model's chats."""

    def __init__(
        self, templates: dict[str, str], source: str, model: ModelConfig, tokenizer: Tokenizer
    ) -> None:
        from lmi.chats.template import (
            ChatTemplate,
        )  # with Jinja, which a model without a template does not need

        self._template = ChatTemplate(
            templates, tokenizer.special_tokens, source=source, tells_tools=model.tells_tools
        )
        specials = (
            ()
            if model.special_tokens_in_content
            else (text for text, _ in tokenizer.special_texts.values())
        )
        self._forgery = Forgery(specials)

    @classmethod
    def of(cls, model: ModelConfig, tokenizer: Tokenizer) -> Self | None:
        """Return None for a model without a template. Raises ModelUnusable or BadConfiguration for
        a broken one.
        """
        templates, source = find_templates(Path(model.path), model.chat_template)
        return cls(templates, source, model, tokenizer) if templates else None

    def render(self, chat: Chat, image_placeholder: str) -> tuple[str, list[int]]:
        """Return the prompt, and the places in it where content spells special tokens. It may take
        seconds.

        Raises InvalidRequest if the template refuses the messages, and GenerationFailed if it
        exceeds a limit.
        """
        said = {
            name: self._marked(name, getattr(chat, name))
            for name in ("messages", "tools", "variables")
        }
        return self._forgery.unmark(self._template.render(replace(chat, **said), image_placeholder))

    def _marked(self, name: str, value: Any) -> Any:
        """Return what a client gave for a chat with marks in its texts. Raises InvalidParameter if
        it is too deep.
        """
        try:
            return self._forgery.mark(value)
        except RecursionError:
            field = "chat_template_kwargs" if name == "variables" else name
            raise InvalidParameter(field, "of fewer levels", value) from None


class Forgery:
    """Marks what spells one of some special tokens, or begins to at its end."""

    def __init__(self, specials: Iterable[str]) -> None:
        """Raises ModelUnusable for a special token that is too long to be looked for."""
        self._specials = frozenset(specials) - {""}
        self._in_order = sorted(self._specials)
        self._longest = max(map(len, self._specials), default=0)
        if self._longest > MAX_SPECIAL_CHARS:
            rule = f"have at most {MAX_SPECIAL_CHARS} characters where chats are written"
            raise ModelUnusable(f"special tokens {rule}: one has {self._longest}")

        self._lengths: dict[str, list[int]] = {}  # of the special tokens, by their first characters
        for first, length in sorted({(text[0], len(text)) for text in self._specials}):
            self._lengths.setdefault(first, []).append(length)

        # It takes one look at each of a few characters: a pattern of all special tokens would try
        # each of them.
        num_looked_at = min(NUM_LOOKED_AT, *map(len, self._in_order or [""]))
        chars_at = [
            _one_of({text[place] for text in self._specials}) for place in range(num_looked_at)
        ]
        self._may_begin = re.compile(f"{''.join(chars_at[:1])}(?={''.join(chars_at[1:])})")

    def mark(self, value: Any) -> Any:
        """Return a JSON value with marks in its texts."""
        if not self._specials:
            return value

        if isinstance(value, str):
            text = value.replace(MARK, 2 * MARK)
            return self._may_begin.sub(self._marked, text) + (
                MARK if self._ends_in_beginning(text) else ""
            )

        if isinstance(value, dict):
            return {self.mark(name): self.mark(each) for name, each in value.items()}

        return [self.mark(each) for each in value] if isinstance(value, (list, tuple)) else value

    def _marked(self, found: re.Match[str]) -> str:
        """Return the character at which a special token may begin, with a mark if one does. They
        may overlap.
        """
        char = found[0]
        start = found.start()
        is_special = any(
            found.string[start : start + length] in self._specials for length in self._lengths[char]
        )
        return char + MARK if is_special else char

    def _ends_in_beginning(self, text: str) -> bool:
        """Whether a text ends with the beginning of a special token."""
        first_place = max(0, len(text) - self._longest + 1)
        places = (place for place in range(first_place, len(text)) if text[place] in self._lengths)
        return any(self._is_beginning(text[place:]) for place in places)

    def _is_beginning(self, text: str) -> bool:
        """Whether a special token begins with a text and is longer. In order, such a one is the
        next after it.
        """
        index = bisect_right(self._in_order, text)
        return index < len(self._in_order) and self._in_order[index].startswith(text)

    def unmark(self, text: str) -> tuple[str, list[int]]:
        """Return a text without marks, and the places between its characters where they were."""
        if not self._specials or MARK not in text:
            return text, []

        places: list[int] = []
        pieces = []
        length = 0
        start = 0
        for found in MARKS.finditer(text):
            pieces.append(text[start : found.start()] + found[0][1:])
            length, start = length + len(pieces[-1]), found.end()
            if len(found[0]) == 1:
                places.append(length)

        return "".join([*pieces, text[start:]]), places


def _one_of(chars: Iterable[str]) -> str:
    """Return the pattern of one of some characters."""
    return f"[{''.join(map(re.escape, sorted(chars)))}]"
