"""Coding agents with the lines of docs/apis.md, at a whole server whose model is a script that
calls a tool.
"""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.clients.agents import run
from tests.clients.venvs import ROOT
from tests.served import Server, launch, readable
from tests.system.container import wait_until, write_model

pytestmark = pytest.mark.timeout(900)  # including the installation
KEY = "a-key-of-my-own"  # of the page
TASK = "Write what given.txt says in capitals to made.txt."
# The words of each agent's command
HOW = {
    "codex": (
        "exec",
        "--strict-config",
        "--skip-git-repo-check",
        "--sandbox",
        "danger-full-access",
        TASK,
    ),
    "claude": ("-p", TASK, "--allowedTools", "Bash"),
    "opencode": ("run", TASK),
}
# The echo engine says what the template writes, in which the server finds the forms of calls and
# thoughts. Like Qwen's, this one takes what the system says only at the beginning.
SCRIPT = """
{%- for message in messages if message.role == 'system' and message is not sameas messages[0] %}
{{- raise_exception('System message must be at the beginning.') }}
{%- endfor %}
{%- if messages[-1].role == 'tool' -%}
The tool says: {{ messages[-1].content }}
{%- else -%}
<think>
The file is needed.
</think>
I look.
{%- for function in tools | map(attribute='function') if function.name in ('Bash', 'bash', 'exec_command') %}
<tool_call>
{"name": "{{ function.name }}", "arguments": {
  {%- if function.name == 'bash' %} "description": "Writes the file.", {% endif %}
  "{{ function.parameters.required[0] }}": "tr a-z A-Z < given.txt | tee made.txt"
}}
</tool_call>
{%- endfor %}
{%- endif %}<end>"""  # noqa: E501


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("scripted") / "model"
    options = {
        "model_name": "demo",
        "chat_template": "script.jinja",
        "echo_step_ms": 0,
        "api_key": KEY,
    }
    write_model(
        folder, frontend_workers=1, **{f"option.{name}": value for name, value in options.items()}
    )
    (folder / "script.jinja").write_text(SCRIPT)
    with launch(folder) as server:
        server.wait_ready()
        yield server


def lines(server: Server, language: str, word: str) -> str:
    """The block of the page that has a word, for this server."""
    section = (
        (ROOT / "docs" / "apis.md")
        .read_text()
        .partition("## Coding agents")[2]
        .partition("\n## ")[0]
    )
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    [code_block] = [block for block in blocks if word in block]
    return str(code_block.replace("localhost:8080", f"127.0.0.1:{server.port}"))


def exported(block: str) -> dict[str, str]:
    """The environment that a block of the page makes."""
    pairs = (
        pair
        for line in block.splitlines()
        if line.startswith("export ")
        for pair in shlex.split(line)[1:]
    )
    return dict(pair.split("=", 1) for pair in pairs)


@contextmanager
def asking_nobody_else() -> Iterator[dict[str, str]]:
    """The environment in which an agent would ask others by way of a proxy, at which nobody has
    rung in the end.
    """
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        url = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        yield {"HTTP_PROXY": url, "HTTPS_PROXY": url, "http_proxy": url, "https_proxy": url}
        assert not readable([proxy])


def check_work(
    server: Server,
    path: str,
    tmp_path: Path,
    environ: dict[str, str],
    name: str,
    *arguments: str,
    num_requests: int = 2,
) -> None:
    """Let an agent work in a folder: it makes a file, and its last words are what the tool said of
    it.
    """
    folder = tmp_path / "work"
    home = tmp_path / "home"
    for directory in (folder, home):
        directory.mkdir(exist_ok=True)

    (folder / "given.txt").write_text("swordfish\n")
    before = len(requests(server))
    output = run(name, folder, home, environ, *arguments).strip()
    assert (folder / "made.txt").read_text() == "SWORDFISH\n"
    # Opencode prints each of its messages
    assert "The tool says: " in output
    assert output.endswith("SWORDFISH")
    wait_until(
        lambda: len(requests(server)) >= before + num_requests, "all requests are in the log"
    )
    assert requests(server)[before:] == [(f"POST {path}", 200)] * num_requests


def requests(server: Server) -> list[tuple[str, int]]:
    return [
        (line["message"], line["status"])
        for line in server.log_lines()
        if line.get("logger") == "lmi.access"
    ]


def test_codex_calls_a_tool_and_tells_what_it_said(scripted: Server, tmp_path: Path) -> None:
    config = tmp_path / "home" / ".codex" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(lines(scripted, "toml", "model_providers"))
    environ = exported(lines(scripted, "sh", "codex"))
    with asking_nobody_else() as proxies:
        check_work(scripted, "/v1/responses", tmp_path, environ | proxies, "codex", *HOW["codex"])


def test_claude_code_calls_a_tool_and_tells_what_it_said(scripted: Server, tmp_path: Path) -> None:
    environ = exported(lines(scripted, "sh", "claude"))
    with asking_nobody_else() as proxies:
        check_work(scripted, "/v1/messages", tmp_path, environ | proxies, "claude", *HOW["claude"])


def test_opencode_calls_a_tool_and_tells_what_it_said(scripted: Server, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "opencode.json").write_text(lines(scripted, "json", "opencode.ai"))
    environ = exported(lines(scripted, "sh", "opencode"))
    path = "/v1/chat/completions"
    arguments = HOW["opencode"]
    # One is for a title
    check_work(scripted, path, tmp_path, environ, "opencode", *arguments, num_requests=3)
