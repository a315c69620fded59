"""What an engine makes of the folder of adapters, here without sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path

from lmi.adapters.files import Adapter
from lmi.adapters.keeper import AdapterKeeper
from lmi.capabilities import Capabilities
from lmi.engine.messages import AdapterOutcome
from lmi.engine.server import Dispatcher
from lmi.shared.desired_state import Folder, State
from lmi.shared.state import Block
from tests.descriptors import no_descriptor_left
from tests.scripted import ScriptedExecutor


def test_an_adapter_whose_entry_cannot_be_read_for_a_moment_stays_loaded(tmp_path: Path) -> None:
    async def follow(executor: ScriptedExecutor) -> None:
        folder = Folder(tmp_path / "adapters", Adapter)
        entry = Adapter(name="formal", path="/formal", state=State.READY)
        assert folder.add(entry)

        keeper = AdapterKeeper(
            executor, folder, Dispatcher(executor, Block.create(tmp_path / "b", 1, 1).engines[0])
        )
        await keeper.follow()
        loaded = {"formal": AdapterOutcome(entry.stamp)}
        assert keeper.outcomes == loaded

        [file] = tmp_path.rglob("*.json")
        whole = file.read_bytes()
        file.write_bytes(b"{")
        await keeper.follow()
        with no_descriptor_left():
            await keeper.follow()

        assert keeper.outcomes == loaded and executor.info.adapters == ("formal",)

        file.write_bytes(whole)
        rude = Adapter(name="rude", path="/rude", state=State.READY)
        assert folder.add(rude)

        await keeper.follow()
        assert keeper.outcomes == loaded | {"rude": AdapterOutcome(rude.stamp)}

    executor = ScriptedExecutor(Capabilities(lora=True))
    try:
        asyncio.run(follow(executor))
    finally:
        executor.shutdown()
