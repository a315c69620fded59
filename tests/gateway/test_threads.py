"""Blocking calls of the gateway, in threads beside its event loop."""

from __future__ import annotations

import asyncio
import sys

import pytest

from lmi.gateway.threads import run_in_thread


def test_a_call_that_ends_its_thread_is_told_to_its_caller_and_the_loop_goes_on() -> None:
    async def call() -> int:
        with pytest.raises(RuntimeError, match=r"SystemExit\(3\)"):
            await run_in_thread(sys.exit, 3)

        return await run_in_thread(len, "abc")

    assert asyncio.run(call()) == 3
