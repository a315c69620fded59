"""Where the template of a model is found, and what a model without one needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmi.chats.prompts import ChatPrompts
from lmi.errors import BadConfiguration, ModelUnusable
from lmi.settings.config import ModelConfig
from lmi.text.tokenizer import Tokenizer
from lmi.types import Chat
from tests.text.small_tokenizers import byte_level_backend

TOKENIZER = Tokenizer(byte_level_backend())
MESSAGES = [{"role": "user", "content": "Hi"}]


def render(
    folder: Path, override: str | None = None, tools: list[dict[str, Any]] | None = None
) -> str:
    prompts = ChatPrompts.of(
        ModelConfig(path=str(folder), name="m", chat_template=override), TOKENIZER
    )
    assert prompts is not None
    return prompts.render(Chat(messages=MESSAGES, tools=tools), "")[0]


def test_a_model_without_a_template_needs_no_jinja(tmp_path: Path) -> None:
    code = (
        "import sys; from tests.chats.test_prompts import *; "
        f"print(ChatPrompts.of(ModelConfig(path={str(tmp_path)!r}, name='m'), TOKENIZER), 'jinja2' "
        f"in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "None False\n"


def test_a_template_is_found_where_models_keep_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "of the config"}))
    assert render(tmp_path) == "of the config"
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with tools"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert (render(tmp_path), render(tmp_path, tools=[{}])) == ("plain", "with tools")
    (tmp_path / "chat_template.jinja").write_text("of its own file")
    assert render(tmp_path) == "of its own file"


def test_the_option_overrides_the_model(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("of the model")
    (tmp_path / "other.jinja").write_text("other")
    assert render(tmp_path, override="other.jinja") == "other"
    assert render(tmp_path, override=str(tmp_path / "other.jinja")) == "other"
    assert render(tmp_path, override="{{ 'inline' }}") == "inline"
    with pytest.raises(BadConfiguration, match=r"nowhere\.jinja"):
        render(tmp_path, override="nowhere.jinja")


@pytest.mark.parametrize(
    ("name", "data", "fault"),
    [
        ("chat_template.jinja", b"\xff", "utf-8"),
        ("chat_template.jinja", b"x" * 300_000, "over 262144 characters"),
        ("chat_template.json", b"{", "Expecting"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, data: bytes, fault: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ModelUnusable, match=rf"{name}: .*{fault}"):
        render(tmp_path)


def test_a_broken_template_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("a\n{% for %}")
    with pytest.raises(ModelUnusable, match=r"chat_template\.jinja: .*line 2"):
        render(tmp_path)

    (tmp_path / "other.jinja").write_text("a\n{% for %}")
    with pytest.raises(ModelUnusable, match=rf"^{tmp_path}/other\.jinja: .*line 2"):
        render(tmp_path, override="other.jinja")
