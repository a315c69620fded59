"""The removal of expired sessions while a server runs."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from lmi.server.service import Service

# The time between two looks for sessions that have expired.
CLEAN_S = 60.0

# The log names the module that its readers know.
log = logging.getLogger("lmi.sessions.http")


@asynccontextmanager
async def kept_clean(
    services: Mapping[str, Service], every_s: float = CLEAN_S
) -> AsyncIterator[None]:
    """Remove the expired sessions of these models, which may change, again and again inside the
    block.
    """

    async def clean() -> None:
        while True:
            await asyncio.sleep(every_s)
            sessions_of_models = [service.sessions for service in services.values()]

            for sessions in sessions_of_models:
                if sessions is None:
                    continue

                try:
                    await asyncio.to_thread(sessions.remove_expired)
                except OSError as error:
                    log.warning("expired sessions cannot be removed: %s", error)

    cleaner = asyncio.create_task(clean())
    try:
        yield
    finally:
        cleaner.cancel()
