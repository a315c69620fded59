"""The defaults of a model's generation_config.json on a whole server."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.served import Server, serve
from tests.tiny_models import tiny_model

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
ASKED = {"messages": [{"role": "user", "content": "The quick"}], "max_tokens": 24}


def said(server: Server, **fields: object) -> str:
    answer = server.post(ASKED | fields, "/v1/chat/completions")
    assert answer.status == 200, answer.body
    text: str = json.loads(answer.body)["choices"][0]["message"]["content"]
    return text


def test_equal_chats_have_one_answer_where_the_maker_says_so_and_a_client_may_draw(
    tmp_path: Path,
) -> None:
    model = shutil.copytree(tiny_model("llama"), tmp_path / "tiny")
    file = model / "generation_config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"do_sample": True, "top_k": 1, "top_p": 7})
    )
    (model / "chat_template.jinja").write_text(TEMPLATE)

    with serve(model, "frontend_workers=1", "option.dtype=fp32") as server:
        assert len({said(server) for _ in range(3)}) == 1
        assert len({said(server, top_k=-1, temperature=2) for _ in range(3)}) > 1
        lines = server.log_lines()

    [ready] = [line for line in lines if line.get("event") == "ready"]
    assert ready["generation_defaults"] == {"top_k": 1}

    [warning] = [line for line in lines if "top_p must be" in line.get("message", "")]
    assert (
        "generation_config.json: top_p must be at least 0 and at most 1, given 7"
        in warning["message"]
    )
    assert any("top_k 1 where a request" in line.get("message", "") for line in lines)
