"""`lmi chat`, `lmi complete`, `lmi run-batch` and `lmi bench` against a whole server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import lmi
from tests.served import Server, serve
from tests.system.container import ROOT, free_port

KEY = "key-of-a-test"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    keys = {"LMI_API_KEY": f"{KEY},another"}
    with serve(
        ROOT / "handlers" / "lmi_dist" / "demo", "option.model_name=demo", environ=keys
    ) as server:
        yield server


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMI_API_KEY", f"{KEY},another")


def talk(*words: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "lmi", *words]
    return subprocess.run(
        command, input=typed, capture_output=True, text=True, timeout=120, cwd=ROOT
    )


def url_of(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


def asked(server: Server, path: str, body: dict[str, object]) -> dict[str, object]:
    answer = server.post(
        {"model": "demo", "temperature": 0, **body},
        f"/v1/{path}",
        {"Authorization": f"Bearer {KEY}"},
    )
    choice: dict[str, object] = json.loads(answer.body)["choices"][0]
    return choice


def test_a_chat_remembers_what_was_said(server: Server) -> None:
    messages = [{"role": "system", "content": "Be brief."}]
    for text in ("Who are you?", "And I?"):
        messages.append({"role": "user", "content": text})
        message = asked(server, "chat/completions", {"messages": messages})["message"]
        messages.append({"role": "assistant", "content": message["content"]})  # type: ignore[index]

    words = ("--url", url_of(server), "--system-prompt", "Be brief.", "--temperature", "0")
    done = talk("chat", *words, typed="Who are you?\n\nAnd I?\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{messages[2]['content']}\n{messages[4]['content']}\n"


@pytest.mark.parametrize("folder", ["", "/v1/"])
def test_a_text_is_continued_and_the_url_may_name_v1(server: Server, folder: str) -> None:
    text = asked(server, "completions", {"prompt": "The quick", "max_tokens": 5})["text"]
    words = ("--max-tokens", "5", "--temperature", "0", "-q", "The quick")
    done = talk("complete", "--url", url_of(server) + folder, *words)

    assert (done.returncode, done.stdout) == (0, f"{text}\n"), done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "nobody"], "lmi: 404: "),
        (["--api-key", "wrong"], "lmi: 401: "),
    ],
)
def test_a_refusal_is_one_line(server: Server, words: list[str], said: str) -> None:
    done = talk("chat", "--url", url_of(server), "-q", "Hello", *words)
    assert (
        done.returncode == 1 and done.stderr.startswith(said) and len(done.stderr.splitlines()) == 1
    )


def test_where_no_server_answers_the_command_says_how_to_start_one() -> None:
    done = talk("chat", "--url", f"http://127.0.0.1:{free_port()}")
    assert (
        done.returncode == 1
        and "no server answers at" in done.stderr
        and "`lmi serve` starts one" in done.stderr
    )


def test_a_load_of_chats_has_the_tokens_that_the_server_reports(
    server: Server, tmp_path: Path
) -> None:
    words = (
        "--requests",
        "6",
        "--streams",
        "2",
        "--max-tokens",
        "5",
        "--body",
        '{"ignore_eos": true}',
    )
    done = lmi("bench", url_of(server), *words, "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr

    [report] = json.loads((tmp_path / "found.json").read_bytes())["servers"]
    assert (report["total"]["num_tokens"], report["total"]["counted_by"]) == (30, "usage")
    assert {name.split()[0] for name in report["cpu_s"]} >= {"lmi-front-0", "lmi-engine-0"}


def test_a_batch_has_one_answer_for_each_request(server: Server, tmp_path: Path) -> None:
    shared = {"model": "demo", "max_tokens": 4, "temperature": 0, "stream": True}
    bodies = [{**shared, "prompt": f"{number} foxes"} for number in range(20)]
    bodies[7]["max_tokens"] = -1
    lines = [
        {"custom_id": f"line {number}", "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    source = tmp_path / "in.jsonl"
    target = tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    done = lmi(
        "run-batch",
        "-i",
        str(source),
        "-o",
        str(target),
        "--url",
        url_of(server),
        "--concurrency",
        "3",
    )
    assert done.returncode == 1 and "1 requests have no answer of 200" in done.stderr

    answers = {
        answer["custom_id"]: answer for answer in map(json.loads, target.read_text().splitlines())
    }
    assert answers.keys() == {line["custom_id"] for line in lines}

    refused = answers.pop("line 7")["response"]
    assert refused["status_code"] == 400 and "max_tokens" in refused["body"]["error"]["message"]

    text = asked(server, "completions", {"prompt": "3 foxes", "max_tokens": 4})["text"]
    assert answers["line 3"]["response"]["body"]["choices"][0]["text"] == text
    assert all(
        answer["response"]["status_code"] == 200 and answer["error"] is None
        for answer in answers.values()
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{}", "line 2: not a request with custom_id, url and body"),
        ("not json", "line 2: not a request"),
        (
            '{"custom_id": "a", "url": "/v1/rerank", "body": {}}',
            "line 2: url='/v1/rerank': allowed is",
        ),
    ],
)
def test_a_line_that_is_no_request_is_named(
    server: Server, tmp_path: Path, line: str, said: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(f"\n{line}\n")
    done = lmi(
        "run-batch", "-i", str(source), "-o", str(tmp_path / "out.jsonl"), "--url", url_of(server)
    )
    assert done.returncode == 1 and f"lmi: {said}" in done.stderr
