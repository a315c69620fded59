"""What the engine's process tells the executor of those who ask, and those whom it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from handlers.echo import EchoExecutor
from lmi.engine.messages import AskStatus, Refused, RequestStatus, Submit, ToFrontEnd, encode
from lmi.engine.queue import RequestQueue
from lmi.engine.server import Dispatcher, FrontEndConnection, listed
from lmi.errors import EngineLost, from_info
from lmi.executor import (
    Capabilities,
    EngineInfo,
    ErrorKind,
    GuidedDecodingParams,
    GuideType,
    LoraConfig,
    PromptProgress,
    Request,
    Response,
    ResponseError,
)
from lmi.shared.state import MAX_LORA_NAMES_BYTES, Block, EngineRecord, Phase
from lmi.types import Origin, WaitStatus

GUIDE = GuidedDecodingParams(GuideType.REGEX, "a")


class Noting(EchoExecutor):
    """It refuses guides, after it has noted who sent them."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        super().__init__()

    def enqueue_request(self, request: Request) -> int:
        self.asked.append(request)
        return super().enqueue_request(request)


def test_the_executor_learns_which_guides_are_of_one_client_and_nothing_else_of_it(
    tmp_path: Path,
) -> None:
    async def submit(executor: Noting) -> None:
        dispatcher = Dispatcher(executor, Block.create(tmp_path / "block", 1, 1).engines[0])
        connection = FrontEndConnection(dispatcher)
        for number, (client, guide) in enumerate(
            [("ann", GUIDE), ("bob", GUIDE), ("ann", GUIDE), ("ann", None)]
        ):
            request = Request((1, 2), 4, guided_decoding_params=guide)
            dispatcher.submit(connection, Submit(number, request, Origin(client=client)))

    with Noting() as executor:
        asyncio.run(submit(executor))
        ann, bob, again, plain = (request.client_id for request in executor.asked)

    assert ann == again is not None and bob not in (ann, None)
    assert plain is None


class Told(FrontEndConnection):
    """It keeps what a front end would receive."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher)
        self.messages: list[ToFrontEnd] = []

    def send(self, message: ToFrontEnd) -> None:
        self.messages.append(message)


def end(executor: EchoExecutor, dispatcher: Dispatcher) -> None:
    dispatcher.is_closing = True


def stop_by_itself(executor: EchoExecutor, dispatcher: Dispatcher) -> None:
    executor.shutdown()


@pytest.mark.parametrize("leave", [end, stop_by_itself])
def test_an_engine_that_ends_refuses_as_one_that_was_lost_so_that_another_gets_the_request(
    tmp_path: Path, leave: Callable[[EchoExecutor, Dispatcher], None]
) -> None:
    async def submit(executor: EchoExecutor) -> None:
        dispatcher = Dispatcher(executor, Block.create(tmp_path / "block", 1, 1).engines[0])
        leave(executor, dispatcher)
        connection = Told(dispatcher)
        dispatcher.submit(connection, Submit(0, Request((1, 2), 4), Origin()))
        [refused] = connection.messages
        assert isinstance(refused, Refused) and isinstance(from_info(refused.error), EngineLost)

    with EchoExecutor() as executor:
        asyncio.run(submit(executor))


def test_who_asks_is_told_the_place_in_the_queue_and_how_far_the_prompt_is(tmp_path: Path) -> None:
    async def submit(executor: EchoExecutor) -> None:
        queue = RequestQueue(1)
        dispatcher = Dispatcher(executor, Block.create(tmp_path / "block", 1, 1).engines[0], queue)
        connection = Told(dispatcher)
        for number in range(3):
            dispatcher.submit(connection, Submit(number, Request((1, 2), 4), Origin()))

        # The last one is of nobody
        for number in (2, 1, 0, 7):
            connection.take(encode(AskStatus(number)))

        told_messages = [
            (message.request_id, message.status)
            for message in connection.messages
            if isinstance(message, RequestStatus)
        ]
        assert told_messages[:2] == [
            (2, WaitStatus(2, 0, 0, 2, None)),
            (1, WaitStatus(2, 0, 0, 1, None)),
        ]

        [(number, running)] = told_messages[2:]
        assert (number, running.num_prompt_tokens, running.queue_position) == (0, 2, 0)

    with EchoExecutor() as executor:
        asyncio.run(submit(executor))


class Adapted(EchoExecutor):
    """It has adapters, of which a batch may have two."""

    @property
    def info(self) -> EngineInfo:
        capabilities = Capabilities(lora=True)
        return msgspec.structs.replace(
            super().info, capabilities=capabilities, adapters=tuple("abcd"), max_loras=2
        )


def test_the_record_tells_which_adapters_run_and_which_wait_for_a_place(tmp_path: Path) -> None:
    async def submit(executor: Adapted) -> None:
        record = Block.create(tmp_path / "block", 1, 1).engines[0]
        dispatcher = Dispatcher(executor, record, RequestQueue(4))
        connection = Told(dispatcher)
        dispatcher.connections.add(connection)
        for number, adapter in enumerate(["b", None, "a", "c", "d", "b"]):
            lora = None if adapter is None else LoraConfig(adapter)
            dispatcher.submit(
                connection, Submit(number, Request((1, 2), 4, lora_config=lora), Origin())
            )

        dispatcher.observe()
        assert (record.max_loras, record.running_loras, record.waiting_loras) == (2, "a,b", "b,c,d")

        for number in range(6):
            dispatcher.cancel(connection.entries[number])

        executor.shutdown()
        dispatcher.deliver(executor.await_responses())  # type: ignore[arg-type]
        dispatcher.observe()

        assert (record.running_loras, record.waiting_loras) == ("", "")

    with Adapted() as executor:
        asyncio.run(submit(executor))


def test_names_of_adapters_that_have_no_room_in_a_record_are_left_out_whole() -> None:
    names = [f"adapter-{number}-{'x' * 90}" for number in range(30)]
    text = listed(names)

    assert len(text) < MAX_LORA_NAMES_BYTES
    assert set(text.split(",")) < set(names)
    assert len(text.split(",")) == 20


def test_an_engine_tells_how_much_of_a_prompt_is_computed() -> None:
    with EchoExecutor() as executor:
        request_id = executor.enqueue_request(Request((1, 2, 3), 4000, streaming=True))
        assert executor.await_responses(request_id)
        assert executor.get_prompt_progress(request_id) == PromptProgress(3, 0)
        assert executor.get_prompt_progress(request_id + 1) == PromptProgress()


class Noticing(Told):
    """It notes the phase in which its engine is as others see it when an answer is on its way."""

    record: EngineRecord
    phases: list[int]

    def send_output(self, responses: list[Response]) -> None:
        self.phases.append(self.record.phase)


def test_an_engine_that_stops_is_not_ready_any_more_before_the_first_client_hears_of_it(
    tmp_path: Path,
) -> None:
    async def submit(executor: Noting) -> None:
        record = Block.create(tmp_path / "block", 1, 1).engines[0]
        record.phase = Phase.READY
        dispatcher = Dispatcher(executor, record)
        connection = Noticing(dispatcher)
        connection.phases = []
        connection.record = record
        for number in range(2):
            dispatcher.submit(connection, Submit(number, Request((1, 2), 4), Origin()))

        first, second = dispatcher._entries
        dispatcher.deliver(
            [Response(first, error=ResponseError("one rank is slow", ErrorKind.GENERATION))]
        )
        executor.shutdown()
        dispatcher.deliver(
            [Response(second, error=ResponseError("one rank is lost", ErrorKind.ENGINE_LOST))]
        )

        assert connection.phases == [Phase.READY, Phase.DRAINING]

    with Noting() as executor:
        asyncio.run(submit(executor))
