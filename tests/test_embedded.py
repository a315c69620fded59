"""A server in the process of another one: its application answers as `lmi serve` does."""

from __future__ import annotations

import asyncio
import gc
import json
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.types import ASGIApp, Message
from tokenizers import Tokenizer

from lmi.embedded import embedded
from lmi.errors import BadConfiguration, ModelUnusable

CHAT = "/v1/chat/completions"
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
# It runs until its client leaves.
ENDLESS = QUESTION | {"max_tokens": 400, "ignore_eos": True, "stream": True}
TIMEOUT_S = 60.0
DEMO = Path(__file__).parents[1] / "handlers" / "lmi_dist" / "demo"


async def ask(
    app: ASGIApp,
    path: str,
    body: object = None,
    send: Callable[[Message], Awaitable[None]] | None = None,
) -> list[Message]:
    """Return what the application sends to a client that stays until the end."""
    messages: list[Message] = []
    requests = [
        {"type": "http.request", "body": b"" if body is None else json.dumps(body).encode()}
    ]

    async def receive() -> Message:
        if not requests:
            await asyncio.Event().wait()

        return requests.pop()

    async def keep(message: Message) -> None:
        messages.append(message)

    method = "GET" if body is None else "POST"
    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}
    await app(scope, receive, send or keep)
    return messages


def text_of(messages: list[Message]) -> str:
    return b"".join(message.get("body", b"") for message in messages).decode()


@asynccontextmanager
async def demo(**options: str) -> AsyncIterator[ASGIApp]:
    async with asyncio.timeout(TIMEOUT_S), embedded("demo", options) as app:
        yield app


def test_an_embedded_server_answers_whole_and_in_a_stream() -> None:
    async def run() -> None:
        async with demo() as app:
            health = await ask(app, "/ping")
            whole = await ask(app, CHAT, QUESTION)
            stream = await ask(app, CHAT, QUESTION | {"stream": True})
            unknown = await ask(app, CHAT, QUESTION | {"temperature": "hot"})

        assert health[0]["status"] == 200
        [choice] = json.loads(text_of(whole))["choices"]
        assert choice["message"]["content"] == "The capital of France is Paris."

        events = text_of(stream).removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
        deltas = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
        assert len(stream) > 5
        assert (
            "".join(delta["delta"]["content"] for delta in deltas) == choice["message"]["content"]
        )

        assert unknown[0]["status"] == 400 and "temperature" in text_of(unknown)

    asyncio.run(run())


def test_a_request_whose_client_leaves_is_dropped() -> None:
    async def run() -> None:
        async with demo() as app:
            has_begun = asyncio.Event()

            async def send(message: Message) -> None:
                if message.get("body"):
                    has_begun.set()

            asking = asyncio.create_task(ask(app, CHAT, ENDLESS, send))
            await has_begun.wait()
            asking.cancel()
            await asyncio.wait([asking])

            while num_running(text_of(await ask(app, "/metrics"))):
                await asyncio.sleep(0.01)

    asyncio.run(run())


def num_running(metrics: str) -> float:
    [line] = [line for line in metrics.splitlines() if line.startswith("lmi_requests_running")]
    return float(line.split()[-1])


def test_two_servers_in_one_process_end_without_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def run() -> None:
        async with demo() as first:
            async with demo(**{"option.model_name": "second"}) as second:
                answers = await asyncio.gather(
                    ask(first, CHAT, QUESTION), ask(second, CHAT, QUESTION)
                )

            after = await ask(first, CHAT, QUESTION)

        models = [json.loads(text_of(answer))["model"] for answer in (*answers, after)]
        assert models == ["demo", "second", "demo"]

    asyncio.run(run())
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_starts_and_ends_applications_changes_nothing() -> None:
    async def run() -> None:
        async with demo() as app:
            told = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
            sent: list[str] = []

            async def receive() -> Message:
                return next(told)

            async def send(message: Message) -> None:
                sent.append(message["type"])

            await app({"type": "lifespan", "state": {}}, receive, send)
            answer = await ask(app, CHAT, QUESTION)

        assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
        assert answer[0]["status"] == 200

    asyncio.run(run())


def test_a_block_that_fails_leaves_no_task_and_no_object_behind() -> None:
    async def run() -> None:
        num_frozen = gc.get_freeze_count()
        with pytest.raises(ZeroDivisionError):
            async with demo():
                raise ZeroDivisionError

        assert asyncio.all_tasks() == {asyncio.current_task()}
        # What is frozen is never collected: it would be the host's and the engine's.
        assert gc.get_freeze_count() == num_frozen

    asyncio.run(run())


def test_a_start_that_nobody_waits_for_leaves_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    threads_before = set(threading.enumerate())

    async def run() -> None:
        starting = asyncio.create_task(demo().__aenter__())
        # The engine is loaded as soon as the server has its folder.
        while not list(tmp_path.iterdir()):
            await asyncio.sleep(0)

        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled()

    asyncio.run(run())
    assert set(threading.enumerate()) == threads_before
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_has_stopped_is_told_by_ping() -> None:
    breaking = {"inputs": "a", "parameters": {"max_new_tokens": 1}}

    [fault_token] = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode("a").ids

    async def run() -> None:
        options = {"option.rolling_batch": "echo", "option.echo_fault_token": str(fault_token)}
        async with demo(**options) as app:
            while (await ask(app, "/ping"))[0]["status"] == 200:
                await ask(app, "/invocations", breaking)

            health = await ask(app, "/ping")
            answer = await ask(app, "/invocations", breaking)

        assert (health[0]["status"], answer[0]["status"]) == (500, 503)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"option.num_threads": "1", "option.env": "A=1"}, ["option.env", "option.num_threads"]),
        ({"minWorkers": "2", "maxWorkers": "2"}, ["minWorkers"]),
        ({"option.model_id": "owner/name"}, ["owner/name is not here", "lmi pull"]),
        ({"option.max_rolling_batch_size": "many"}, ["option.max_rolling_batch_size", "many"]),
    ],
)
def test_what_needs_further_processes_is_refused(options: dict[str, str], words: list[str]) -> None:
    async def run() -> None:
        folder = None if "option.model_id" in options else "demo"
        async with embedded(folder, options):
            pass

    with pytest.raises(BadConfiguration) as refusal:
        asyncio.run(run())

    assert all(word in str(refusal.value) for word in words), refusal.value


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with embedded(str(tmp_path)):
            pass

    with pytest.raises((BadConfiguration, ModelUnusable)):
        asyncio.run(run())


def test_code_that_comes_with_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def handle(inputs): ...\n")

    async def run() -> None:
        async with embedded(str(tmp_path)):
            pass

    with pytest.raises(BadConfiguration, match="code of its own"):
        asyncio.run(run())
