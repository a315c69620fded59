"""What the engine's process tells the executor of those who ask."""

from __future__ import annotations

import asyncio
from pathlib import Path

from handlers.echo import EchoExecutor
from lmi.engine.messages import Submit
from lmi.engine.server import Dispatcher, FrontEndConnection
from lmi.executor import GuidedDecodingParams, GuideType, Request
from lmi.shared.state import Block
from lmi.types import Origin

GUIDE = GuidedDecodingParams(GuideType.REGEX, "a")


class Noting(EchoExecutor):
    """It refuses guides, after it has noted who sent them."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        super().__init__()

    def enqueue_request(self, request: Request) -> int:
        self.asked.append(request)
        return super().enqueue_request(request)


def test_the_executor_learns_which_guides_are_of_one_client_and_nothing_else_of_it(tmp_path: Path) -> None:
    async def submit(executor: Noting) -> None:
        dispatcher = Dispatcher(executor, Block.create(tmp_path / "block", 1, 1).engines[0])
        connection = FrontEndConnection(dispatcher)
        for number, (client, guide) in enumerate([("ann", GUIDE), ("bob", GUIDE), ("ann", GUIDE), ("ann", None)]):
            request = Request((1, 2), 4, guided_decoding_params=guide)
            dispatcher.submit(connection, Submit(number, request, Origin(client=client)))

    with Noting() as executor:
        asyncio.run(submit(executor))
        ann, bob, again, plain = (request.client_id for request in executor.asked)
    assert ann == again is not None and bob not in (ann, None)
    assert plain is None
