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
from pathlib import Path
from typing import Any, Self

from msgspec.structs import replace

from lmi.errors import InvalidParameter, ModelUnusable
from lmi.settings.chat_templates import find_templates
from lmi.settings.config import ModelConfig
from lmi.text.tokenizer import Tokenizer
from lmi.types import Chat

# One of Unicode's noncharacters. Content that has it nevertheless has two for one while it is
# marked.
MARK = "\ufdd0"
MARKS = re.compile(f"{MARK}{MARK}?")
MAX_SPECIAL_CHARS = 256
# A pattern finds by so many characters where a special token may begin.
NUM_LOOKED_AT = 4


class ChatPrompts:
    """Writes the prompts of one model's chats."""

    def __init__(
        self, templates: dict[str, str], source: str, model: ModelConfig, tokenizer: Tokenizer
    ) -> None:
        # It imports Jinja, which a model without a template does not need.
        from lmi.chats.template import ChatTemplate

        self._template = ChatTemplate(
            templates, tokenizer.special_tokens, source=source, tells_tools=model.tells_tools
        )
        specials: list[str] = []
        if not model.special_tokens_in_content:
            specials = [text for text, _ in tokenizer.special_texts.values()]

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
        marked_chat = replace(
            chat,
            messages=self._marked("messages", chat.messages),
            tools=self._marked("tools", chat.tools),
            variables=self._marked("variables", chat.variables),
        )
        prompt = self._template.render(marked_chat, image_placeholder)
        return self._forgery.unmark(prompt)

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
    """Marks texts where they spell a special token, or may begin to spell one at their end."""

    def __init__(self, specials: Iterable[str]) -> None:
        """Raises ModelUnusable for a special token that is too long to be looked for."""
        self._specials = frozenset(specials) - {""}
        self._in_order = sorted(self._specials)
        self._longest = max(map(len, self._specials), default=0)
        if self._longest > MAX_SPECIAL_CHARS:
            rule = f"have at most {MAX_SPECIAL_CHARS} characters where chats are written"
            raise ModelUnusable(f"special tokens {rule}: one has {self._longest}")

        # The lengths of the special tokens, by their first characters.
        self._lengths: dict[str, list[int]] = {}
        for first, length in sorted({(text[0], len(text)) for text in self._specials}):
            self._lengths.setdefault(first, []).append(length)

        # It takes one look at each of a few characters: a pattern of all special tokens would try
        # each of them.
        num_looked_at = min(NUM_LOOKED_AT, *map(len, self._in_order or [""]))
        patterns = []
        for place in range(num_looked_at):
            patterns.append(_one_of({text[place] for text in self._specials}))

        self._may_begin = re.compile(f"{''.join(patterns[:1])}(?={''.join(patterns[1:])})")

    def mark(self, value: Any) -> Any:
        """Return a JSON value with marks in its texts."""
        if not self._specials:
            return value

        if isinstance(value, str):
            return self._marked_text(value.replace(MARK, 2 * MARK))

        if isinstance(value, dict):
            return {self.mark(name): self.mark(inner) for name, inner in value.items()}

        if isinstance(value, (list, tuple)):
            return [self.mark(inner) for inner in value]

        return value

    def _marked_text(self, text: str) -> str:
        marked = self._may_begin.sub(self._marked, text)
        return marked + MARK if self._ends_in_beginning(text) else marked

    def _marked(self, beginning: re.Match[str]) -> str:
        """Return the character at which a special token may begin, with a mark if one does. They
        may overlap.
        """
        char = beginning[0]
        text = beginning.string
        start = beginning.start()
        for length in self._lengths[char]:
            if text[start : start + length] in self._specials:
                return char + MARK

        return char

    def _ends_in_beginning(self, text: str) -> bool:
        """Whether a text ends with the beginning of a special token."""
        first_place = max(0, len(text) - self._longest + 1)
        for place in range(first_place, len(text)):
            if text[place] in self._lengths and self._is_beginning(text[place:]):
                return True

        return False

    def _is_beginning(self, text: str) -> bool:
        """Whether a special token begins with a text and is longer. Among the sorted tokens such a
        one comes next after the text.
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
        for marks in MARKS.finditer(text):
            # Of two marks the second one is the content's.
            piece = text[start : marks.start()] + marks[0][1:]
            pieces.append(piece)
            length += len(piece)
            start = marks.end()
            if len(marks[0]) == 1:
                places.append(length)

        return "".join([*pieces, text[start:]]), places


def _one_of(chars: Iterable[str]) -> str:
    """Return the pattern of one of some characters."""
    return f"[{''.join(map(re.escape, sorted(chars)))}]"
