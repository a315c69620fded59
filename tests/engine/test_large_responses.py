"""Results that are larger than a frame of the engine socket: a real executor, dispatcher and front
end's client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from handlers.lmi_dist import Executor
from lmi.engine.client import Engines, ResponseStream
from lmi.engine.server import Dispatcher, FrontEndConnection
from lmi.errors import GenerationFailed
from lmi.executor import OutputConfig, Request, Result, SamplingConfig
from lmi.ipc import MAX_FRAME_BYTES
from lmi.shared.state import Block, Phase
from tests.fake_runner import FakeRunner

TIMEOUT_S = 60
VOCAB_SIZE = 200_000
NUM_TOO_MANY = MAX_FRAME_BYTES // (4 * VOCAB_SIZE) + 1  # rows of logits
GREEDY = SamplingConfig(temperature=0)


@asynccontextmanager
async def front_end(folder: Path, executor: Executor) -> AsyncIterator[Engines]:
    block = Block.create(folder / "state", num_engines=1, num_frontends=1)
    dispatcher = Dispatcher(executor, block.engines[0])
    path = str(folder / "engine.sock")
    executor.pass_responses_to(dispatcher.deliver)
    server = await asyncio.get_running_loop().create_unix_server(
        lambda: FrontEndConnection(dispatcher), path
    )
    block.engines[0].phase = Phase.READY
    engines = Engines([path], block.engines)
    await engines.start()
    async with asyncio.timeout(TIMEOUT_S):
        while not [
            connection for connection in engines.open.values() if connection.info is not None
        ]:
            await asyncio.sleep(0.005)

    try:
        yield engines
    finally:
        await engines.close()
        server.close()


async def results(stream: ResponseStream) -> list[Result]:
    results_taken: list[Result] = []
    async with asyncio.timeout(TIMEOUT_S):
        await stream.forward(results_taken.append)

    return results_taken


@pytest.mark.parametrize("streaming", [False, True])
def test_a_response_over_the_limit_is_an_error_with_both_numbers_and_hurts_no_other(
    tmp_path: Path, streaming: bool
) -> None:
    """Streamed, the first Response is too large and further ones would follow."""

    async def test(executor: Executor) -> None:
        large = Request(
            (1,) * NUM_TOO_MANY,
            3,
            streaming=streaming,
            sampling_config=GREEDY,
            output_config=OutputConfig(return_context_logits=True),
        )
        small = Request(
            (1, 2),
            3,
            sampling_config=GREEDY,
            output_config=OutputConfig(return_context_logits=True),
        )
        async with front_end(tmp_path, executor) as engines:
            bad = engines.submit(large)
            good = engines.submit(small)
            num_bytes = 4 * VOCAB_SIZE * NUM_TOO_MANY
            with pytest.raises(
                GenerationFailed, match=f"too large .* at most {MAX_FRAME_BYTES} bytes"
            ) as error:
                await results(bad)

            assert int(str(error.value).split()[-1]) > num_bytes

            [answer] = await results(good)
            assert (
                answer.context_logits is not None
                and len(answer.context_logits.data) == 4 * VOCAB_SIZE * 2
            )

            [again] = await results(engines.submit(small))
            assert again.output_token_ids == answer.output_token_ids

    with Executor(FakeRunner(vocab_size=VOCAB_SIZE)) as executor:
        asyncio.run(test(executor))
