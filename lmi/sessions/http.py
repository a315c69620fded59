"""Sessions over HTTP: opened and closed by a body, named by a header.

    {"requestType": "NEW_SESSION"}   200, X-Amzn-SageMaker-Session-Id: ID; Expires=TIME
    {"requestType": "CLOSE"}         200, X-Amzn-SageMaker-Closed-Session-Id: ID

TIME has the form of 2026-01-02T03:04:05Z.

The header of a new session has two names: that of AWS's guide and the reference, and that of AWS's
library and vLLM. No history is kept: a client sends its whole context with each request. A session
sends all its requests to one engine, whose prefix cache then serves them.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import msgspec

from lmi.apis.base.readers import LEFT_OUT, PROMPTS, BodyOutline, without_mark
from lmi.errors import LmiError, Unavailable, shorten
from lmi.http.exchange import Exchange
from lmi.server.service import Service
from lmi.sessions.folder import InvalidSession, Session, Sessions

HEADER = "X-Amzn-SageMaker-Session-Id"
NEW_HEADER = "X-Amzn-SageMaker-New-Session-Id"
CLOSED_HEADER = "X-Amzn-SageMaker-Closed-Session-Id"
NEW_SESSION = "NEW_SESSION"
CLOSE = "CLOSE"
MAX_ID_CHARS = 256
ID = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*")  # of the API model of sagemaker-runtime
ID_RULE = (
    f"{NEW_SESSION} or an id of at most {MAX_ID_CHARS} letters and digits, with - only between them"
)
CLEAN_S = 60.0  # between two looks for sessions that have expired

log = logging.getLogger(__name__)


def request_type(body: bytes, *, is_ours: bool = True) -> str | None:
    """Return NEW_SESSION or CLOSE if the body asks for that, None if it asks for an answer. Raises
    InvalidSession.

    Beside it a body has no other field. If user code reads the bodies, `is_ours` is False, and
    every other value of the field and every other field but a prompt belongs to that code.
    """
    if b'"requestType"' not in body:
        return None

    fields = BodyOutline.of(body)
    if fields is None or not fields.has("request_type"):
        return None

    given = fields.value("request_type")
    if given not in (NEW_SESSION, CLOSE):
        if not is_ours:
            return None

        raise InvalidSession("requestType", f"{NEW_SESSION} or {CLOSE}", given)

    for name, value in msgspec.json.decode(without_mark(body), type=dict[str, msgspec.Raw]).items():
        if name != "requestType" and value not in LEFT_OUT and (is_ours or name in PROMPTS):
            raise InvalidSession("requestType", f"left out beside {shorten(name)}", given)

    return str(given)


async def change_session(exchange: Exchange, service: Service, asked: str) -> None:
    """Open or close a session and answer. Raises InvalidSession, SessionFailed or Unavailable."""
    sessions = switched_on(service, "requestType", asked)
    if asked == NEW_SESSION:
        client = exchange.scope.get(
            "client"
        )  # behind SageMaker and other proxies all clients have the same address
        session = await asyncio.to_thread(sessions.open, str(client[0]) if client else "")
        expires = datetime.fromtimestamp(int(session.expires_s), UTC)  # rounded down
        said = f"{session.id}; Expires={expires:%Y-%m-%dT%H:%M:%SZ}"
        done = "created"
        headers = [(HEADER, said), (NEW_HEADER, said)]
    else:
        session_id = given_id(exchange)
        if session_id in (None, "", NEW_SESSION):
            raise InvalidSession(HEADER, "the id of the session to close", session_id)

        session = await open_session(sessions, str(session_id))
        if not await asyncio.to_thread(sessions.close, session.id):
            raise not_open(session.id)

        done = "closed"
        headers = [(CLOSED_HEADER, session.id)]

    body = b'{"result": "Session %b %b"}\n' % (session.id.encode(), done.encode())
    await exchange.send_whole(200, "application/json", body, headers)


async def session_of(exchange: Exchange, service: Service) -> str | None:
    """Return the id of the open session that the request belongs to, or None. Raises
    InvalidSession.
    """
    session_id = given_id(exchange)
    if session_id is None:
        return None

    sessions = switched_on(service, HEADER, session_id)
    if session_id in ("", NEW_SESSION):
        said = (
            f"{HEADER} is {session_id!r} and the body does not open a session: the request is "
            f"served without one"
        )
        log.info("%s", said, extra={"request_id": exchange.request_id})
        return None

    return (await open_session(sessions, session_id)).id


def given_id(exchange: Exchange) -> str | None:
    """Return the header, or None if the request has none. Raises InvalidSession for one that no
    session can have.
    """
    given = exchange.headers.get(HEADER)
    if given and (len(given) > MAX_ID_CHARS or (given != NEW_SESSION and not ID.fullmatch(given))):
        raise InvalidSession(HEADER, ID_RULE, given)

    return given


def switched_on(service: Service, name: str, given: str) -> Sessions:
    if service.sessions is None:
        raise InvalidSession(
            name, "left out: sessions are off here (option.enable_stateful_sessions)", given
        )

    return service.sessions


async def open_session(sessions: Sessions, session_id: str) -> Session:
    try:
        session = await asyncio.to_thread(sessions.find, session_id)
    except OSError as error:  # for a moment, as without a free descriptor
        raise Unavailable(f"the session cannot be read now: {error.strerror}") from None

    if session is None or session.has_expired:
        raise not_open(session_id)

    return session


def not_open(session_id: str) -> LmiError:
    return InvalidSession(
        HEADER, "the id of an open session, and this one is unknown, closed or expired", session_id
    )


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
            for sessions in [
                service.sessions for service in services.values() if service.sessions is not None
            ]:
                try:
                    await asyncio.to_thread(sessions.remove_expired)
                except OSError as error:
                    log.warning("expired sessions cannot be removed: %s", error)

    cleaner = asyncio.create_task(clean())
    try:
        yield
    finally:
        cleaner.cancel()
