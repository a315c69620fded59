"""The prompts of chats: the model's template writes them, and what content spells of special tokens stays text.

A special token, such as `<|im_start|>`, is a template's to write; in content it would forge a role. So content is
marked before the template renders it: a character that no text should have breaks each spelling, also one that two
contents spell together. The marks of the rendered text show the tokenizer which spellings it should encode as text.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from lmi.settings.chat_templates import find_templates
from lmi.settings.config import ModelConfig
from lmi.text.tokenizer import Tokenizer
from lmi.types import Chat

MARK = "\ufdd0"  # one of Unicode's noncharacters; content that has it nevertheless has two for one while it is marked
MARKS = re.compile(f"{MARK}{MARK}?")


class ChatPrompts:
    """Writes the prompts of one model's chats."""

    def __init__(self, templates: dict[str, str], source: str, model: ModelConfig, tokenizer: Tokenizer) -> None:
        from lmi.chats.template import ChatTemplate  # with Jinja, which a model without a template does not need

        self._template = ChatTemplate(templates, tokenizer.special_tokens, source=source, tells_tools=model.tells_tools)
        specials = () if model.special_tokens_in_content else (text for text, _ in tokenizer.special_texts.values())
        self._forgery = Forgery(specials)

    @classmethod
    def of(cls, model: ModelConfig, tokenizer: Tokenizer) -> Self | None:
        """Return None for a model without a template. Raises ModelUnusable or BadConfiguration for a broken one."""
        templates, source = find_templates(Path(model.path), model.chat_template)
        return cls(templates, source, model, tokenizer) if templates else None

    def render(self, chat: Chat, image_placeholder: str) -> tuple[str, list[int]]:
        """Return the prompt, and the places in it where content spells special tokens. It may take seconds."""
        said = {name: self._forgery.mark(getattr(chat, name)) for name in ("messages", "tools", "variables")}
        return self._forgery.unmark(self._template.render(replace(chat, **said), image_placeholder))


class Forgery:
    """Marks what spells one of some special tokens, or begins to at its end."""

    def __init__(self, specials: Iterable[str]) -> None:
        texts = list(specials)
        rests = {text[0]: [re.escape(each[1:]) for each in texts if each[0] == text[0]] for text in texts}
        firsts = (f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items())  # spellings may overlap
        self._first_char = re.compile("|".join(firsts)) if texts else None
        self._beginnings = {text[:length] for text in texts for length in range(1, len(text))}
        self._longest = max(map(len, self._beginnings), default=0)

    def mark(self, value: Any) -> Any:
        """Return a JSON value with marks in its texts."""
        if self._first_char is None:
            return value
        if isinstance(value, str):
            text = value.replace(MARK, 2 * MARK)
            lengths = range(1, min(self._longest, len(text)) + 1)
            is_beginning = any(text[-length:] in self._beginnings for length in lengths)
            return self._first_char.sub(lambda found: found[0] + MARK, text) + (MARK if is_beginning else "")
        if isinstance(value, dict):
            return {self.mark(name): self.mark(each) for name, each in value.items()}
        return [self.mark(each) for each in value] if isinstance(value, (list, tuple)) else value

    def unmark(self, text: str) -> tuple[str, list[int]]:
        """Return a text without marks, and the places between its characters where they were."""
        if self._first_char is None or MARK not in text:
            return text, []
        places: list[int] = []
        pieces, length, start = [], 0, 0
        for found in MARKS.finditer(text):
            pieces.append(text[start : found.start()] + found[0][1:])
            length, start = length + len(pieces[-1]), found.end()
            if len(found[0]) == 1:
                places.append(length)
        return "".join([*pieces, text[start:]]), places
