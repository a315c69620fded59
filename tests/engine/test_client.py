"""The front end's side of the socket, against a small real server that speaks the same frames."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from lmi.engine.client import Engines, ResponseStream, slot_of
from lmi.engine.messages import (
    Cancel,
    Ready,
    Refused,
    Responses,
    Submit,
    ToEngine,
    decode_to_engine,
    encode,
)
from lmi.engine.prefixes import PrefixEngines, PrefixTable, keys_of
from lmi.errors import (
    EngineLost,
    GenerationFailed,
    InvalidParameter,
    LmiError,
    Overloaded,
    PromptTooLong,
    RequestTooLarge,
    Unavailable,
)
from lmi.executor import (
    EngineInfo,
    FinishReason,
    GuidedDecodingParams,
    GuideType,
    Request,
    Response,
    ResponseError,
    Result,
)
from lmi.http.body import BodyMemory
from lmi.ipc import MAX_PASSED_BYTES, FrameReader, frame
from lmi.shared.state import Block, Phase

INFO = EngineInfo(name="scripted", vocab_size=10, max_sequence_length=100, max_num_sequences=4)
REQUEST = Request(input_token_ids=(1, 2, 3), max_tokens=5)


class ScriptedEngine:
    """An engine worker that sends what the test gives it and remembers what it received."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.heard: list[ToEngine] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.may_read = asyncio.Event()
        self.may_read.set()

    async def start(self) -> None:
        self.server = await asyncio.start_unix_server(self._serve, self.path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        self.say(Ready(INFO))
        frames = FrameReader()
        while data := await reader.read(65536):
            await self.may_read.wait()
            self.heard += [decode_to_engine(payload) for payload in frames.feed(data)]

    def say(self, message: Ready | Responses | Refused) -> None:
        self.writers[-1].write(frame(encode(message)))

    async def stop(self) -> None:
        self.server.close()
        for writer in self.writers:
            writer.close()

        await self.server.wait_closed()


@asynccontextmanager
async def engines(
    tmp_path: Path, num: int = 1, kind: type[Engines] = Engines, memory: BodyMemory | None = None
) -> AsyncIterator[tuple[Engines, list[ScriptedEngine], Block]]:
    block = Block.create(tmp_path / "state", num_engines=num, num_frontends=1)
    scripted = [ScriptedEngine(str(tmp_path / f"engine-{slot}.sock")) for slot in range(num)]
    for engine, record in zip(scripted, block.engines, strict=True):
        await engine.start()
        record.phase = Phase.READY

    client = kind([engine.path for engine in scripted], block.engines, memory=memory)
    await client.start()
    await until(lambda: is_connected(client, num))
    try:
        yield client, scripted, block
    finally:
        await client.close()
        for engine in scripted:
            await engine.stop()


def is_connected(client: Engines, num: int) -> bool:
    return sum(connection.info is not None for connection in client.open.values()) == num


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def results(stream: ResponseStream) -> list[Result]:
    results_taken: list[Result] = []
    await asyncio.wait_for(stream.forward(results_taken.append), 60)
    return results_taken


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def token(request_id: int, token_id: int, *, is_final: bool = False) -> Response:
    reason = FinishReason.LENGTH if is_final else FinishReason.NOT_FINISHED
    return Response(request_id, Result([[token_id]], is_final, is_final, finish_reasons=[reason]))


def test_each_stream_gets_its_own_responses_in_order(tmp_path: Path) -> None:
    async def test() -> None:
        async with engines(tmp_path) as (client, [engine], _):
            first = client.submit(REQUEST)
            second = client.submit(REQUEST)
            await until(lambda: len(engine.heard) == 2)
            engine.say(Responses([token(0, 5), token(1, 7)]))
            engine.say(Responses([token(1, 8, is_final=True), token(0, 6, is_final=True)]))

            assert [result.output_token_ids for result in await results(first)] == [[[5]], [[6]]]
            assert [result.output_token_ids for result in await results(second)] == [[[7]], [[8]]]

    run(test)


def test_a_result_is_taken_in_the_turn_of_its_frame_and_wakes_no_task(tmp_path: Path) -> None:
    async def test() -> None:
        async with engines(tmp_path) as (client, [engine], _):
            results_taken: list[Result] = []
            first = client.submit(REQUEST)
            second = client.submit(REQUEST)
            tasks = [
                asyncio.create_task(stream.forward(results_taken.append))
                for stream in (first, second)
            ]
            await until(lambda: len(engine.heard) == 2)
            client.open[0].take(encode(Responses([token(0, 5), token(1, 7)])))
            assert [result.output_token_ids for result in results_taken] == [[[5]], [[7]]]

            client.open[0].take(
                encode(Responses([token(0, 6, is_final=True), token(1, 8, is_final=True)]))
            )
            await asyncio.wait_for(asyncio.gather(*tasks), 60)

    run(test)


def test_results_wait_in_order_while_a_slow_client_holds_up_their_stream(tmp_path: Path) -> None:
    async def test() -> None:
        async with engines(tmp_path) as (client, [engine], _):
            reads_on = asyncio.Event()
            slow = client.submit(REQUEST)
            fast = client.submit(REQUEST)
            token_ids: list[int] = []

            def take(result: Result) -> Awaitable[None] | None:
                token_ids.extend(result.output_token_ids[0])
                return None if reads_on.is_set() else reads_on.wait()

            task = asyncio.create_task(slow.forward(take))  # type: ignore[arg-type]
            await until(lambda: len(engine.heard) == 2)
            engine.say(
                Responses(
                    [
                        token(0, 1),
                        token(0, 2),
                        token(1, 9, is_final=True),
                        token(0, 3, is_final=True),
                    ]
                )
            )
            assert len(await results(fast)) == 1 and token_ids == [1]

            reads_on.set()
            await asyncio.wait_for(task, 60)

            assert token_ids == [1, 2, 3]

    run(test)


def test_a_stream_that_was_cancelled_before_it_could_wait_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with engines(tmp_path) as (client, [engine], _):
            stream = client.submit(REQUEST)
            pause = asyncio.sleep(60)
            task = asyncio.create_task(stream.forward(lambda result: pause))
            await until(lambda: len(engine.heard) == 1)
            client.open[0].take(encode(Responses([token(0, 5)])))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

            stream.close()
            assert inspect.getcoroutinestate(pause) == inspect.CORO_CLOSED

    run(test)


def test_an_error_while_a_result_is_taken_ends_only_its_stream(tmp_path: Path) -> None:
    async def test() -> None:
        async with engines(tmp_path) as (client, [engine], _):
            failing = client.submit(REQUEST)
            neighbour = client.submit(REQUEST)
            task = asyncio.create_task(
                failing.forward(lambda result: [][result.output_token_ids[0][0]])
            )
            await until(lambda: len(engine.heard) == 2)
            engine.say(Responses([token(0, 5), token(1, 7)]))
            with pytest.raises(IndexError):
                await asyncio.wait_for(task, 60)

            failing.close()
            await until(lambda: len(engine.heard) == 3)
            assert engine.heard[2] == Cancel(0)

            engine.say(Responses([token(1, 8, is_final=True)]))
            assert len(await results(neighbour)) == 2

    run(test)


def test_a_stream_that_is_closed_while_it_takes_a_result_takes_no_more(tmp_path: Path) -> None:
    async def test() -> None:
        async with engines(tmp_path) as (client, [engine], _):
            stream = client.submit(REQUEST)
            results_taken: list[Result] = []

            def take(result: Result) -> None:
                results_taken.append(result)
                stream.close()

            task = asyncio.create_task(stream.forward(take))
            await until(lambda: len(engine.heard) == 1)
            engine.say(Responses([token(0, 5), token(0, 6)]))
            await asyncio.wait_for(task, 60)
            await until(lambda: len(engine.heard) == 2)

            assert engine.heard[1] == Cancel(0) and len(results_taken) == 1

    run(test)


def test_a_stream_closed_early_cancels_and_a_finished_one_does_not(tmp_path: Path) -> None:
    async def test() -> None:
        async with engines(tmp_path) as (client, [engine], _):
            finished = client.submit(REQUEST)
            early = client.submit(REQUEST)
            await until(lambda: len(engine.heard) == 2)
            engine.say(Responses([token(0, 5, is_final=True)]))
            await results(finished)
            finished.close()
            early.close()
            await until(lambda: len(engine.heard) == 3)

            assert engine.heard[2] == Cancel(1)

    run(test)


def test_a_lost_engine_ends_its_requests_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with engines(tmp_path) as (client, [engine], block):
            stream = client.submit(REQUEST)
            await until(lambda: len(engine.heard) == 1)
            block.engines[0].phase = Phase.LOST
            engine.writers[0].transport.abort()
            with pytest.raises(Unavailable, match="lost"):
                await results(stream)

            with pytest.raises(Unavailable, match="no engine is ready: lost"):
                client.submit(REQUEST)

    run(test)


def test_the_engine_that_comes_back_is_used_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with engines(tmp_path) as (client, [engine], _):
            engine.writers[0].transport.abort()
            await until(lambda: len(engine.writers) == 2)
            await until(lambda: 0 in client.open and client.open[0].info is not None)
            client.submit(REQUEST)
            await until(lambda: len(engine.heard) == 1)

    run(test)


def test_the_least_loaded_engine_gets_the_request(tmp_path: Path) -> None:
    async def test() -> None:
        async with engines(tmp_path, num=2) as (client, [first, second], _):
            long = Request(input_token_ids=(1,) * 50, max_tokens=40)
            client.submit(long)
            streams = [client.submit(REQUEST) for _ in range(3)]
            await until(lambda: len(first.heard) == 1 and len(second.heard) == 3)
            streams[0].close()

            assert client.open[1].num_outstanding_tokens == 2 * 8

    run(test)


def test_a_prompt_goes_to_the_engine_that_has_had_its_beginning_unless_that_has_much_to_do(
    tmp_path: Path,
) -> None:
    first, second = (
        Request(input_token_ids=(token_id,) * 192, max_tokens=8) for token_id in (1, 2)
    )

    async def test() -> None:
        async with engines(tmp_path, num=2, kind=PrefixEngines) as (client, scripted, _):

            def slot_of(request: Request) -> int:
                streams.append(client.submit(request))
                return next(
                    slot
                    for slot, connection in client.open.items()
                    if connection is streams[-1].connection
                )

            streams: list[ResponseStream] = []
            assert [slot_of(first), slot_of(second)] == [0, 1]

            for stream in streams:
                stream.close()

            assert [slot_of(next_stream) for next_stream in (second, first, second)] == [1, 0, 1]
            assert slot_of(second) == 0, (
                "to compute its beginning again takes less than what is queued before it"
            )

            for stream in streams:
                stream.close()

            assert slot_of(msgspec.structs.replace(second, cache_salt="another's")) == 0

            await scripted[0].stop()
            await until(lambda: list(client.open) == [1])

            assert isinstance(client, PrefixEngines) and client.num_known(keys_of(first))[0] == 0

    run(test)


def test_front_ends_share_what_they_know_of_cached_prompts(tmp_path: Path) -> None:
    prompts = [Request(input_token_ids=(token_id,) * 192, max_tokens=8) for token_id in range(1, 9)]

    async def test() -> None:
        async with engines(tmp_path, num=2, kind=PrefixEngines) as (alone, scripted, block):
            sockets = [engine.path for engine in scripted]
            path = tmp_path / "prefixes"
            front_ends = [
                PrefixEngines(sockets, block.engines, table=PrefixTable.shared(path))
                for _ in range(2)
            ]
            for front_end in front_ends:
                await front_end.start()

            await until(lambda: all(is_connected(front_end, 2) for front_end in front_ends))

            def slot_of(front_end: Engines, request: Request) -> int:
                stream = front_end.submit(request)
                slot = next(
                    slot
                    for slot, connection in front_end.open.items()
                    if connection is stream.connection
                )
                stream.close()
                return slot

            first, second = front_ends
            busy = first.submit(Request(input_token_ids=(99,) * 64, max_tokens=8))

            assert [slot_of(first, prompt) for prompt in prompts] == [1] * 8
            assert [slot_of(second, prompt) for prompt in prompts] == [1] * 8
            assert [slot_of(alone, prompt) for prompt in prompts] == [0] * 8, (
                "who shares nothing knows nothing"
            )

            busy.close()

            await first.close()
            assert second.num_known(keys_of(prompts[0])) == [0, 192], (
                "a front end that ends is no lost engine"
            )

            await scripted[1].stop()
            await until(lambda: list(second.open) == [0])
            assert second.num_known(keys_of(prompts[0])) == [0, 0]

            await second.close()

    run(test)


def test_what_keeps_prompts_apart_is_alike_in_every_process() -> None:
    code = (
        "from lmi.engine.prefixes import keys_of\n"
        "from lmi.executor import LoraConfig, Request\n"
        "plain, apart = Request((7,) * 130, 8), Request((7,) * 130, 8, "
        "lora_config=LoraConfig('a'), cache_salt='s')\n"
        "print(keys_of(plain), keys_of(apart))"
    )

    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }

    assert len(outputs) == 1


def test_a_table_without_room_on_the_disk_is_a_front_ends_own(tmp_path: Path) -> None:
    table = PrefixTable.shared(tmp_path / "missing" / "prefixes")
    table.note([5, -6], 1)
    assert table.num_known_blocks([5, -6, 7], 2) == [0, 2]


def test_an_engine_that_has_had_a_block_has_had_those_before_it_whose_place_is_taken() -> None:
    table = PrefixTable()
    keys = keys_of(Request((7,) * 640, 8))
    table.note(keys, 0)
    # Of another prompt, at the same place
    table.note([keys[3] + (1 << 40)], 1)
    assert table.num_known_blocks(keys, 2) == [10, 0]
    table.note(keys[:2], 1)
    assert table.num_known_blocks(keys, 2) == [10, 2]
    table.forget(0)
    assert table.num_known_blocks(keys, 2) == [0, 2]


def test_requests_of_one_prompt_cache_key_go_to_one_engine_while_the_loads_allow_it(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with engines(tmp_path, num=3, kind=PrefixEngines) as (client, _, _):

            def slot_of_next(first_token: int, key: str | None) -> int:
                request = Request((first_token, *range(1000)), 16)
                streams.append(client.submit(request, prompt_cache_key=key))
                return next(
                    slot
                    for slot, connection in client.open.items()
                    if connection is streams[-1].connection
                )

            streams: list[ResponseStream] = []
            for key in ("conversation-1", "conversation-2", "conversation-3", "conversation-4"):
                own_slot = slot_of(key, range(3))
                # Prompts that share nothing
                for first_token in range(4):
                    assert slot_of_next(first_token, key) == own_slot
                    streams.pop().close()

                assert slot_of_next(5, key) == own_slot
                assert slot_of_next(6, key) != own_slot, "others wait for nothing"

                for stream in streams:
                    stream.close()

                streams.clear()

    run(test)


def test_what_has_not_begun_at_one_engine_may_go_to_another(tmp_path: Path) -> None:
    async def test() -> None:
        async with engines(tmp_path, num=2) as (client, scripted, _):
            begun = client.submit(REQUEST)
            refused = client.submit(REQUEST)
            await until(lambda: all(engine.heard for engine in scripted))
            scripted[0].say(Responses([token(0, 7)]))
            scripted[1].say(Refused(1, Overloaded("the queue is full").info))
            with pytest.raises(Overloaded):
                await results(refused)

            await until(lambda: begun.has_begun)
            assert not refused.has_begun

            again = client.send_elsewhere(refused)
            assert again is not None

            await until(lambda: len(scripted[0].heard) == 2)
            scripted[0].say(Responses([token(1, 8, is_final=True)]))
            assert [result.output_token_ids for result in await results(again)] == [[[8]]]

            await scripted[1].stop()
            await until(
                lambda: sum(engine.info is not None for engine in client.open.values()) == 1
            )

            assert client.send_elsewhere(begun) is None

    run(test)


def test_what_an_engine_gives_up_before_a_token_because_it_shuts_down_may_go_to_another(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with engines(tmp_path, num=2) as (client, scripted, _):
            stream = client.submit(REQUEST)
            await until(lambda: scripted[0].heard != [])
            ends = [
                Result([[]], index == 1, True, index, [FinishReason.CANCELLED]) for index in (0, 1)
            ]
            scripted[0].say(Responses([Response(0, end) for end in ends]))
            with pytest.raises(EngineLost):
                await results(stream)

            assert not stream.has_begun

            again = client.send_elsewhere(stream)
            assert again is not None

            await until(lambda: scripted[1].heard != [])
            scripted[1].say(Responses([token(0, 8, is_final=True)]))

            assert [result.output_token_ids for result in await results(again)] == [[[8]]]
            assert len(scripted[0].heard) == 1, "an engine that has given up is not told to cancel"

    run(test)


def test_requests_of_a_session_go_to_one_engine_however_loaded_it_is(tmp_path: Path) -> None:
    async def test() -> None:
        async with engines(tmp_path, num=3) as (client, scripted, _):
            for _ in range(20):
                client.submit(REQUEST, "a session")

            await until(lambda: sum(len(engine.heard) for engine in scripted) == 20)
            assert sorted(len(engine.heard) for engine in scripted) == [0, 0, 20]

    run(test)


def test_sessions_are_spread_over_the_engines(tmp_path: Path) -> None:
    async def test() -> None:
        async with engines(tmp_path, num=3) as (client, scripted, _):
            for number in range(90):
                client.submit(REQUEST, f"session {number}")

            await until(lambda: sum(len(engine.heard) for engine in scripted) == 90)
            assert min(len(engine.heard) for engine in scripted) > 15

    run(test)


def test_a_session_whose_engine_is_lost_goes_to_another_and_the_other_sessions_stay(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with engines(tmp_path, num=3) as (client, scripted, block):
            before = {str(n): await engine_of(client, scripted, str(n)) for n in range(12)}
            lost = scripted[before["0"]]
            block.engines[before["0"]].phase = Phase.LOST
            lost.writers[0].transport.abort()
            await until(lambda: len(client.open) == 2)
            for session, slot in before.items():
                now = await engine_of(client, scripted, session)
                assert (now != slot) if scripted[slot] is lost else (now == slot)

    run(test)


def test_a_session_whose_engine_has_a_full_queue_goes_to_the_least_loaded(tmp_path: Path) -> None:
    async def test() -> None:
        async with engines(tmp_path, num=2) as (client, scripted, block):
            slot = await engine_of(client, scripted, "a session")
            record = block.engines[slot]
            record.max_num_sequences = 4
            record.num_waiting = 3
            assert await engine_of(client, scripted, "a session") == slot

            record.num_waiting = 4
            assert await engine_of(client, scripted, "a session") == 1 - slot

    run(test)


async def engine_of(client: Engines, scripted: list[ScriptedEngine], session: str) -> int:
    """Send a request of a session and return the slot of the engine that got it."""
    num_heard = [len(engine.heard) for engine in scripted]
    client.submit(REQUEST, session)
    await until(lambda: [len(engine.heard) for engine in scripted] != num_heard)
    [slot] = [slot for slot, engine in enumerate(scripted) if len(engine.heard) > num_heard[slot]]
    return slot


def test_an_engine_that_has_fallen_silent_gets_no_new_requests(tmp_path: Path) -> None:
    async def test() -> None:
        async with engines(tmp_path, num=2) as (client, [silent, alive], block):
            block.engines[1].beat_s = time.monotonic()
            for _ in range(4):
                client.submit(REQUEST)

            await until(lambda: len(alive.heard) == 4)
            assert not silent.heard

    run(test)


def test_a_request_too_large_for_a_frame_is_refused_and_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with engines(tmp_path) as (client, _, _):
            huge = Request(input_token_ids=(2**40,) * (8 << 20), max_tokens=1)
            with pytest.raises(RequestTooLarge, match="at most 67108864 bytes"):
                client.submit(huge)

            assert client.open[0].num_outstanding_tokens == 0

    run(test)


@pytest.mark.parametrize(
    "error",
    [
        Overloaded("9 wait"),
        Unavailable("no step"),
        InvalidParameter("seed", "small", 9),
        PromptTooLong("short", "9"),
    ],
)
def test_a_refusal_comes_out_as_the_error_it_was(tmp_path: Path, error: LmiError) -> None:
    async def test() -> None:
        async with engines(tmp_path) as (client, [engine], _):
            stream = client.submit(REQUEST)
            await until(lambda: len(engine.heard) == 1)
            engine.say(Refused(0, error.info))
            with pytest.raises(LmiError) as caught:
                await results(stream)

            assert type(caught.value) is type(error)
            assert (str(caught.value), caught.value.field) == (str(error), error.field)

    run(test)


def test_an_error_response_is_raised_and_nothing_is_cancelled_after_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with engines(tmp_path) as (client, [engine], _):
            stream = client.submit(REQUEST)
            await until(lambda: len(engine.heard) == 1)
            engine.say(Responses([Response(0, error=ResponseError("NaN in the logits"))]))
            with pytest.raises(GenerationFailed, match="NaN"):
                await results(stream)

            stream.close()
            client.submit(REQUEST)
            await until(lambda: len(engine.heard) == 2)

            assert isinstance(engine.heard[1], Submit)

    run(test)


def test_bytes_that_are_no_message_close_the_connection_and_end_its_requests(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with engines(tmp_path) as (client, [engine], _):
            stream = client.submit(REQUEST)
            await until(lambda: len(engine.heard) == 1)
            engine.writers[0].write(frame(b"\xff\xff\xff"))
            with pytest.raises(Unavailable):
                await results(stream)

    run(test)


@dataclass
class Counted:
    num_body_bytes: int = 0


def large(salt: str | None = None) -> Request:
    """A request of about a megabyte."""
    guide = GuidedDecodingParams(GuideType.REGEX, "a" * 1_000_000)
    return msgspec.structs.replace(REQUEST, guided_decoding_params=guide, cache_salt=salt)


def test_an_engine_that_has_stopped_reading_holds_nothing_of_those_who_have_left(
    tmp_path: Path,
) -> None:
    counted = Counted()

    async def test() -> None:
        memory = BodyMemory(counted, 100_000_000)
        async with engines(tmp_path, memory=memory) as (client, [engine], _):
            engine.may_read.clear()
            streams = [client.submit(large(str(number))) for number in range(40)]
            assert 40_000_000 < counted.num_body_bytes < 41_000_000

            for stream in streams[:-1]:
                stream.close(has_left=True)

            connection = client.open[0]
            assert connection._transport is not None
            assert connection._transport.get_write_buffer_size() < 1_000_100 + MAX_PASSED_BYTES
            assert counted.num_body_bytes < 3_000_000, (
                "that of the last one, and what the transport has"
            )

            engine.may_read.set()
            await until(
                lambda: any(
                    isinstance(message, Submit) and message.request_id == 39
                    for message in engine.heard
                )
            )
            ids = [message.request_id for message in engine.heard if isinstance(message, Submit)]

            assert len(ids) <= 2, "others never reach the engine"
            assert counted.num_body_bytes < 1_100_000

            engine.say(Responses([token(39, 5, is_final=True)]))
            assert len(await results(streams[-1])) == 1
            assert counted.num_body_bytes == 0

    run(test)


def test_frames_to_an_engine_that_does_not_read_have_a_bound(tmp_path: Path) -> None:
    counted = Counted()

    async def test() -> None:
        async with engines(tmp_path, memory=BodyMemory(counted, 3_500_000)) as (
            client,
            [engine],
            _,
        ):
            engine.may_read.clear()
            streams = [client.submit(large()) for _ in range(3)]
            with pytest.raises(Overloaded, match="max_body_memory"):
                client.submit(large())

            client.submit(REQUEST).close()
            assert client.open[0].num_outstanding_tokens == 3 * 8

            for stream in streams:
                stream.close()

            engine.may_read.set()
            await until(lambda: counted.num_body_bytes == 0)

    run(test)


def test_a_frame_counts_until_the_first_token_or_until_the_engine_is_lost(tmp_path: Path) -> None:
    counted = Counted()

    async def test() -> None:
        async with engines(tmp_path, num=2, memory=BodyMemory(counted, 100_000_000)) as (
            client,
            scripted,
            _,
        ):
            first = client.submit(large())
            second = client.submit(large())
            await until(lambda: all(engine.heard for engine in scripted))
            assert counted.num_body_bytes > 2_000_000, "another engine may get them"

            scripted[0].say(Responses([token(0, 7)]))
            await until(lambda: first.has_begun)
            assert 1_000_000 < counted.num_body_bytes < 1_100_000

            await scripted[1].stop()
            with pytest.raises(EngineLost):
                await results(second)

            again = client.send_elsewhere(second)
            assert again is not None and 1_000_000 < counted.num_body_bytes < 1_100_000

            await until(lambda: len(scripted[0].heard) == 2)
            again.close()
            first.close()

            assert counted.num_body_bytes == 0

    run(test)
