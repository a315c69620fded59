"""A real server with a scripted engine: real sockets on both sides, and an engine that does what
the prompt says.

The tokenizer has one token for each byte, so prompts and answers are readable in tests. A prompt is
a list of words:

    say TEXT        answer TEXT, then the end token
    run TEXT        answer TEXT without end
    flood TEXT      answer TEXT without end, 100 times in every step
    fail TEXT       answer TEXT, then fail for this request's own reason
    oom TEXT        answer TEXT, then run out of memory
    lose TEXT       answer TEXT, then close the engine's connections as a dying engine does
    hang TEXT       answer TEXT, then nothing more
    late ORDER      wait until the test says `let_go`, then do what the order says, as in
                    `late say hi`
    rest TEXT       answer the first letter of TEXT, wait for `let_go`, then the others
    lack TEXT       answer TEXT without end, one beam too few
    embed TEXT      an embedding whose numbers are the first ids of the prompt, where the request
                    asks for one
    trip            raise an error that no engine should, when the request comes
    refuse FIELD    refuse the request when it comes, for that field of the contract
    reject FIELD    refuse it for that field in the first step

With beams of a width w an answer has that many: TEXT, TEXT1, TEXT2 …, the first one with the lowest
log-probs. It reports as cached what a prompt has in common with an earlier one of the same salt,
and computes every prompt anew.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lmi.adapters.files import Adapter
from lmi.adapters.keeper import AdapterKeeper
from lmi.adapters.registry import AdapterRegistry
from lmi.engine.client import Engines
from lmi.engine.overload import LearningQueue
from lmi.engine.queue import QueueEntry
from lmi.engine.server import Dispatcher, FrontEndConnection
from lmi.errors import InvalidParameter, PromptTooLong
from lmi.executor import (
    Capabilities,
    Embeddings,
    EngineInfo,
    ErrorKind,
    Executor,
    FinishReason,
    IterationStats,
    PromptLogProb,
    PromptProgress,
    Request,
    RequestPerfMetrics,
    RequestStatsPerIteration,
    Response,
    ResponseError,
    Result,
    Tensor,
    TokenLogProb,
)
from lmi.http.protocol import GuardedProtocol
from lmi.pipeline import Pipeline
from lmi.runtime import ServerRuntime
from lmi.server.app import build_app, websocket_at
from lmi.server.front_end import FrontEnd
from lmi.server.service import Models, Service
from lmi.sessions.folder import Sessions
from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig
from lmi.shared.desired_state import Folder
from lmi.shared.memory_file import MemoryFile
from lmi.shared.state import Block, Phase
from lmi.supervisor.credentials import SharedCredentials, hand_over, read_again
from lmi.text import tokenizer as lmi_tokenizer
from lmi.user_code.calls import UserCodeWorkers
from lmi.user_code.options import UserCodeConfig
from lmi.user_code.runner import UserCode
from lmi.user_code.worker import CallConnection, CodeThread
from tests import machine

if TYPE_CHECKING:
    from lmi.tracing import Exporter

CAPABILITIES = Capabilities(max_top_log_probs=5, typical_p=True, perf_metrics=True)
EMBEDDING = Capabilities(perf_metrics=True, embeddings=Embeddings(4, ()))
END_ID = 256
CONTEXT = 200
STEP_S = 0.002


def write_byte_tokenizer(folder: Path) -> None:
    """Write a model folder with only a tokenizer of 256 bytes and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    by_byte = {_byte(char): char for char in alphabet}
    backend = Tokenizer(models.BPE({by_byte[byte]: byte for byte in range(256)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))


def _byte(char: str) -> int:
    """The byte of a character of GPT-2's alphabet: printable Latin-1 is itself, the rest is
    shifted.
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = [byte for byte in range(256) if byte not in plain]
    return ord(char) if ord(char) in plain else shifted[ord(char) - 256]


def times_of_one_that_starts_at_once(now: float) -> RequestPerfMetrics:
    return RequestPerfMetrics(arrival_time=now, first_scheduled_time=now)


@dataclass
class Turn:
    """One request in the scripted engine."""

    request_id: int
    request: Request
    order: str
    left: list[int]
    said: list[int] = field(default_factory=list)
    is_cancelled: bool = False
    # Its first Result is out
    is_begun: bool = False
    # It waits for the test
    is_late: bool = False
    num_cached_tokens: int = 0
    times: RequestPerfMetrics = field(
        default_factory=lambda: times_of_one_that_starts_at_once(time.monotonic())
    )


class ScriptedExecutor(Executor):
    """An engine whose thread makes one token for each request and step, unless the script says
    otherwise.
    """

    def __init__(self, capabilities: Capabilities = CAPABILITIES) -> None:
        self._info = EngineInfo(
            name="scripted",
            vocab_size=257,
            max_sequence_length=CONTEXT,
            max_num_sequences=64,
            kernels="scripted",
            capabilities=capabilities,
        )
        # All that were accepted
        self.requests: list[Request] = []
        self.cancelled: list[int] = []
        self.lost = threading.Event()
        # Those who are late
        self.let_go = threading.Event()
        self.progress: PromptProgress | None = None  # of every prompt
        self._turns: dict[int, Turn] = {}
        self._ready: list[Response] = []  # of this step
        self._take: Callable[[list[Response]], None] = lambda responses: None
        self._changed = threading.Condition()
        self._is_over = False
        self._num_steps = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def num_active(self) -> int:
        return len(self._turns)

    def enqueue_request(self, request: Request) -> int:
        order, _, text = (
            bytes(i for i in request.input_token_ids if i < 256)
            .decode(errors="replace")
            .partition(" ")
        )
        is_late = order == "late"
        if is_late:
            order, _, text = text.partition(" ")

        if order == "trip":
            raise KeyError("the engine's own fault")

        if order == "refuse":
            raise (
                PromptTooLong("short", text)
                if text == "inputs"
                else InvalidParameter(text, "another", None)
            )

        with self._changed:
            request_id = len(self.requests)
            turn = Turn(
                request_id,
                request,
                order,
                list(text.encode()),
                num_cached_tokens=self._num_cached(request),
            )
            turn.is_late = is_late
            self.requests.append(request)
            self._turns[request_id] = turn
            self._changed.notify_all()

        return request_id

    def _num_cached(self, request: Request) -> int:
        prompts = [
            earlier_request.input_token_ids
            for earlier_request in self.requests
            if earlier_request.cache_salt == request.cache_salt
        ]
        shared = [
            len(os.path.commonprefix([earlier_request, request.input_token_ids]))
            for earlier_request in prompts
        ]
        return min(max(shared, default=0), len(request.input_token_ids) - 1)

    def load_adapter(
        self, name: str, path: str, *, pinned: bool = False, preload: bool = True
    ) -> None:
        if not self.capabilities.lora:
            super().load_adapter(name, path, pinned=pinned, preload=preload)

        self._info = msgspec.structs.replace(
            self._info, adapters=tuple(sorted({*self._info.adapters, name}))
        )

    def unload_adapter(self, name: str) -> None:
        names = tuple(adapter for adapter in self._info.adapters if adapter != name)
        self._info = msgspec.structs.replace(self._info, adapters=names)

    def await_responses(
        self, request_id: int | Sequence[int] | None = None, timeout_s: float | None = None
    ) -> list[Response] | list[list[Response]]:
        return []

    def pass_responses_to(self, take: Callable[[list[Response]], None]) -> None:
        self._take = take

    def get_num_responses_ready(self, request_id: int | None = None) -> int:
        return 0

    def cancel_request(self, request_id: int) -> None:
        with self._changed:
            self.cancelled.append(request_id)
            if request_id in self._turns:
                self._turns[request_id].is_cancelled = True

    def get_prompt_progress(self, request_id: int) -> PromptProgress | None:
        return self.progress

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        return [IterationStats(iter=self._num_steps, num_active_requests=len(self._turns))]

    def get_latest_request_stats(self) -> list[RequestStatsPerIteration]:
        return []

    def can_enqueue_requests(self) -> bool:
        return not self._is_over

    def shutdown(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

        self._thread.join()

    def _run(self) -> None:
        while not self._is_over:
            time.sleep(STEP_S)
            with self._changed:
                self._num_steps += 1
                for turn in list(self._turns.values()):
                    self._step(turn)

                ready, self._ready = self._ready, []

            if ready:
                self._take(ready)

    def _step(self, turn: Turn) -> None:
        response = self._advance(turn)
        if response is None:
            return

        if response.is_final:
            del self._turns[turn.request_id]

        if response.is_final or turn.request.streaming:
            self._ready.append(beams(response, turn.request))

    def _advance(self, turn: Turn) -> Response | None:
        request = turn.request
        stops = {word[0] for word in turn.request.stop_words}
        if turn.is_cancelled:
            return self._result(turn, [], FinishReason.CANCELLED)

        is_resting = turn.order == "rest" and len(turn.said) == 1
        if (turn.is_late or is_resting) and not self.let_go.is_set():
            return None

        if turn.order == "reject":
            field = bytes(turn.left).decode()
            return Response(
                turn.request_id, error=ResponseError("must be another", ErrorKind.INVALID, field)
            )

        if request.pooling_params is not None and turn.order == "embed":
            return self._embedding(turn, request.pooling_params.dimensions)

        if turn.order == "flood":
            return self._result(turn, turn.left * 100, FinishReason.NOT_FINISHED)

        if turn.left:
            token = turn.left.pop(0)
            if turn.order in ("run", "lack"):
                turn.left.append(token)

            turn.said.append(token)
            is_last = len(turn.said) >= request.max_tokens
            reason = FinishReason.LENGTH if is_last else FinishReason.NOT_FINISHED
            return self._result(
                turn, [token], FinishReason.STOP_WORDS if token in stops else reason
            )

        if turn.order in ("say", "rest"):
            turn.said.append(END_ID)
            return self._result(turn, [END_ID], FinishReason.END_ID)

        if turn.order in ("fail", "oom"):
            kind = ErrorKind.GENERATION if turn.order == "fail" else ErrorKind.OUT_OF_MEMORY
            return Response(turn.request_id, error=ResponseError("the script says so", kind))

        if turn.order == "lose":
            self.lost.set()

        return None

    def _embedding(self, turn: Turn, dimensions: int | None) -> Response:
        """The numbers of an embedding are the first tokens."""
        numbers = array("f", turn.request.input_token_ids)[: dimensions or 4]
        result = Result([[]], True, True, finish_reasons=[FinishReason.END_ID])
        result.embedding = Tensor((len(numbers),), "float32", numbers.tobytes())
        result.request_perf_metrics = turn.times
        return Response(turn.request_id, result)

    def _result(self, turn: Turn, new: list[int], reason: FinishReason) -> Response:
        is_final = reason is not FinishReason.NOT_FINISHED
        output = turn.request.output_config
        turn.times.last_token_time = time.monotonic()
        turn.times.first_token_time = turn.times.first_token_time or turn.times.last_token_time
        ids = new if turn.request.streaming else turn.said
        result = Result([ids], is_final, is_final, finish_reasons=[reason])
        if is_final or turn.request.streaming:
            result.num_cached_tokens, turn.num_cached_tokens = turn.num_cached_tokens, 0

        if output.return_perf_metrics and is_final:
            result.request_perf_metrics = turn.times

        if output.return_log_probs:
            result.log_probs = [[-0.5] * len(ids)]

        if output.num_top_log_probs:
            best = [TokenLogProb(97 + n, -1.0 - n) for n in range(output.num_top_log_probs)]
            result.top_log_probs = [[best] * len(ids)]

        if (
            output.num_prompt_log_probs is not None
            and not turn.is_begun
            and (is_final or turn.request.streaming)
        ):
            turn.is_begun = True
            result.prompt_log_probs = [
                PromptLogProb(-0.25 if n else None)
                for n in range(len(turn.request.input_token_ids))
            ]

        return Response(turn.request_id, result)


def beams(response: Response, request: Request) -> Response:
    """The Response to a request with beams, made of that to the same request without."""
    width = request.sampling_config.beam_width
    num = request.sampling_config.num_return_sequences
    if width == 1 or response.result is None:
        return response

    result, [ids], [reason] = (
        response.result,
        response.result.output_token_ids,
        response.result.finish_reasons,
    )
    if bytes(request.input_token_ids).startswith(b"lack"):
        num -= 1

    text, end = (ids[:-1], ids[-1:]) if ids[-1:] == [END_ID] else (ids, [])
    result.output_token_ids = [text + list(str(beam or "").encode()) + end for beam in range(num)]
    result.finish_reasons = [reason] * num
    if result.log_probs:
        result.log_probs = [
            [-0.5 / (beam + 1)] * len(ids) for beam, ids in enumerate(result.output_token_ids)
        ]

    return Response(response.request_id, result)


class RecordingTokenizer(lmi_tokenizer.Tokenizer):
    """A tokenizer that keeps which words it has spelled."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.spelled: list[str] = []

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        self.spelled.append(word)
        return super().spellings(word)


class NotingQueue(LearningQueue):
    """A queue that keeps what it was offered last."""

    last_offered: QueueEntry | None = None

    def offer(self, entry: QueueEntry, now: float) -> None:
        self.last_offered = entry
        super().offer(entry, now)


@dataclass
class Host:
    """The running server, for a test."""

    port: int
    executor: ScriptedExecutor
    block: Block  # of the model
    server_block: Block
    config: Config
    loop: asyncio.AbstractEventLoop
    tokenizer: RecordingTokenizer
    queue: NotingQueue
    front_end: FrontEnd
    app: Any
    user_code: UserCodeWorkers | None = None
    credentials: MemoryFile | None = None

    def leave(self) -> None:
        """Do what a front end does as it shuts down."""
        self.loop.call_soon_threadsafe(self.app.leave)

    def read_credentials_again(self) -> None:
        """Do what the supervisor does at SIGHUP."""
        assert self.credentials is not None
        read_again(self.config.server, self.credentials, self.server_block.supervisor)

    def post(
        self, body: object, path: str = "/invocations", headers: dict[str, str] | None = None
    ) -> tuple[HTTPResponse, bytes]:
        """Send one request on its own connection. A dict is sent as JSON without a content type, as
        by boto3.
        """
        return self.send(
            "POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), headers
        )

    def send(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[HTTPResponse, bytes]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response, response.read()
        finally:
            connection.close()


def wait_until(condition: object, timeout_s: float = 60.0) -> None:
    """Poll a callable until it is true."""
    assert callable(condition)
    machine.wait_until(condition, "the condition came true", timeout_s, pause_s=0.002)


class HostProtocol(GuardedProtocol):
    """The protocol of a front end, with a table of its paths."""

    def websocket_at(self, path: str) -> type[Any] | None:
        return websocket_at(path)


@contextmanager
def host(
    folder: Path,
    *,
    server: dict[str, object] | None = None,
    model: dict[str, object] | None = None,
    capabilities: Capabilities = CAPABILITIES,
    user_code: UserCodeConfig | None = None,
    options: dict[str, str] | None = None,
    traces: Callable[[FrontEnd], Exporter | None] | None = None,
    protocol: type[GuardedProtocol] = HostProtocol,
) -> Iterator[Host]:
    """Serve a scripted engine on a free port of loopback, with the user code, if any, in a thread.

    `traces` makes what exports traces. `protocol` has the limits of connections.
    """
    write_byte_tokenizer(folder / "model")
    config = Config(
        server=ServerConfig(**(server or {})),  # type: ignore[arg-type]
        model=ModelConfig(**{"path": str(folder / "model"), "name": "scripted", **(model or {})}),  # type: ignore[arg-type]
        engine=EngineConfig(handler="lmi-dist", options=options or {}),
        user_code=user_code,
    )
    executor = ScriptedExecutor(capabilities)
    block = Block.create(folder / "state", 1, 1, int(user_code is not None))
    started: list[Host] = []
    stop = threading.Event()
    thread = threading.Thread(
        target=lambda: asyncio.run(
            _serve(folder, config, executor, block, started, stop, traces, protocol)
        )
    )
    thread.start()
    try:
        wait_until(lambda: started or not thread.is_alive())
        yield started[0]
    finally:
        stop.set()
        thread.join()
        executor.shutdown()


async def _serve(
    folder: Path,
    config: Config,
    executor: ScriptedExecutor,
    block: Block,
    started: list[Host],
    stop: threading.Event,
    traces: Callable[[FrontEnd], Exporter | None] | None,
    protocol: type[GuardedProtocol],
) -> None:
    loop = asyncio.get_running_loop()
    info = executor.info
    queue = NotingQueue(info.max_num_sequences, math.inf, info.num_express_places)
    dispatcher = Dispatcher(executor, block.engines[0], queue)
    AdapterKeeper(executor, Folder(folder / "adapters", Adapter), dispatcher)
    connections: list[FrontEndConnection] = []

    def connect() -> FrontEndConnection:
        connections.append(FrontEndConnection(dispatcher))
        return connections[-1]

    engine_server = await loop.create_unix_server(connect, str(folder / "engine-0.sock"))
    block.engines[0].phase = Phase.READY
    executor.pass_responses_to(dispatcher.deliver)
    watch = asyncio.create_task(_watch(executor, dispatcher, block, connections))
    tokenizer = RecordingTokenizer.load(config.model.path)
    user_code = None
    user_code_server = None
    if config.user_code is not None:
        user_code, user_code_server = await _run_user_code(folder, config, config.user_code, block)

    limits = config.server.sessions_expiration_s, config.server.max_sessions
    sessions = Sessions(folder / "sessions", *limits) if config.server.enable_sessions else None
    server_block = Block.create(folder / "server", 0, 1)
    server_block.frontends[0].claim()
    models = Models(
        FrontEnd(ServerRuntime(folder, config.server), server_block, server_block.frontends[0])
    )
    engines = Engines(
        [str(folder / "engine-0.sock")], block.engines, memory=models.front_end.body_memory
    )
    pipeline = Pipeline(tokenizer, engines, config.model)
    registry = AdapterRegistry(
        engines, Folder(folder / "adapters", Adapter), config.server.max_adapters
    )
    models.add(
        Service(config, block, models.front_end, engines, pipeline, user_code, sessions, registry)
    )
    credentials = hand_over(config.server)
    shared = (
        None if credentials is None else SharedCredentials(credentials, server_block.supervisor)
    )
    app: Any = build_app(models, traces(models.front_end) if traces else None, shared)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            port=0,
            lifespan="on",
            log_config=None,
            http=protocol,
            ws="none",
            timeout_graceful_shutdown=1,
        )
    )
    server.capture_signals = nullcontext  # type: ignore[method-assign]
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)

    port = server.servers[0].sockets[0].getsockname()[1]
    started.append(
        Host(
            port,
            executor,
            block,
            server_block,
            config,
            loop,
            tokenizer,
            queue,
            models.front_end,
            app,
            user_code,
            credentials,
        )
    )
    while not stop.is_set():
        await asyncio.sleep(0.01)

    app.leave()
    server.should_exit = True
    await task
    watch.cancel()
    engine_server.close()
    if user_code_server is not None:
        user_code_server.close()

    if credentials is not None:
        os.close(credentials.fd)


async def _run_user_code(
    folder: Path, config: Config, code: UserCodeConfig, block: Block
) -> tuple[UserCodeWorkers, asyncio.Server]:
    """Do on the loop what the process of user code does. `djl_python` must be importable."""
    model = UserCode(code, folder=config.model.path, name=config.model.name)
    record = block.formatters[0]
    thread = CodeThread(record)
    path = str(folder / "code-0.sock")
    server = await asyncio.get_running_loop().create_unix_server(
        lambda: CallConnection(model, thread), path
    )
    record.phase = Phase.READY
    return UserCodeWorkers([path], [record]), server


async def _watch(
    executor: ScriptedExecutor,
    dispatcher: Dispatcher,
    block: Block,
    connections: list[FrontEndConnection],
) -> None:
    """Do what the engine's worker does beside the steps."""
    while True:
        block.engines[0].beat_s = time.monotonic()
        # Before its last responses are taken
        is_lost = executor.lost.is_set()
        await asyncio.sleep(0.05)
        dispatcher.observe()
        if is_lost:
            block.engines[0].phase = Phase.LOST
            for connection in connections:
                if connection._transport is not None:
                    connection._transport.abort()
