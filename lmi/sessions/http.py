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
from datetime import UTC, datetime

import msgspec

from lmi.apis.base.body import LEFT_OUT, PROMPTS, BodyOutline, without_mark
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
# Source: the API model of sagemaker-runtime.
ID = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*")
ID_RULE = (
    f"{NEW_SESSION} or an id of at most {MAX_ID_CHARS} letters and digits, with - only between them"
)

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

    kind = fields.value("request_type")
    if kind not in (NEW_SESSION, CLOSE):
        if not is_ours:
            return None

        raise InvalidSession("requestType", f"{NEW_SESSION} or {CLOSE}", kind)

    values = msgspec.json.decode(without_mark(body), type=dict[str, msgspec.Raw])
    for name, value in values.items():
        if name == "requestType" or value in LEFT_OUT:
            continue

        if is_ours or name in PROMPTS:
            raise InvalidSession("requestType", f"left out beside {shorten(name)}", kind)

    return str(kind)


async def change_session(exchange: Exchange, service: Service, kind: str) -> None:
    """Open or close a session, as the request type `kind` asks, and answer. Raises InvalidSession,
    SessionFailed or Unavailable.
    """
    sessions = switched_on(service, "requestType", kind)
    if kind == NEW_SESSION:
        await _open(exchange, sessions)
    else:
        await _close(exchange, sessions)


async def _open(exchange: Exchange, sessions: Sessions) -> None:
    # Behind SageMaker and other proxies all clients have the same address.
    client = exchange.scope.get("client")
    owner = str(client[0]) if client else ""
    session = await asyncio.to_thread(sessions.open, owner)

    # The whole second before the end.
    expires = datetime.fromtimestamp(int(session.expires_s), UTC)
    text = f"{session.id}; Expires={expires:%Y-%m-%dT%H:%M:%SZ}"
    await _answer(exchange, session, "created", [(HEADER, text), (NEW_HEADER, text)])


async def _close(exchange: Exchange, sessions: Sessions) -> None:
    session_id = id_in_header(exchange)
    if session_id in (None, "", NEW_SESSION):
        raise InvalidSession(HEADER, "the id of the session to close", session_id)

    session = await find_open(sessions, str(session_id))
    if not await asyncio.to_thread(sessions.close, session.id):
        raise not_open(session.id)

    await _answer(exchange, session, "closed", [(CLOSED_HEADER, session.id)])


async def _answer(
    exchange: Exchange, session: Session, result: str, headers: list[tuple[str, str]]
) -> None:
    body = b'{"result": "Session %b %b"}\n' % (session.id.encode(), result.encode())
    await exchange.send_whole(200, "application/json", body, headers)


async def session_of(exchange: Exchange, service: Service) -> str | None:
    """Return the id of the open session that the request belongs to, or None. Raises
    InvalidSession.
    """
    session_id = id_in_header(exchange)
    if session_id is None:
        return None

    sessions = switched_on(service, HEADER, session_id)
    if session_id in ("", NEW_SESSION):
        log.info(
            "%s is %r and the body does not open a session: the request is served without one",
            HEADER,
            session_id,
            extra={"request_id": exchange.request_id},
        )
        return None

    session = await find_open(sessions, session_id)
    return session.id


def id_in_header(exchange: Exchange) -> str | None:
    """Return the header, or None if the request has none. Raises InvalidSession for one that no
    session can have.
    """
    session_id = exchange.headers.get(HEADER)
    if not session_id:
        return session_id

    is_allowed = session_id == NEW_SESSION or ID.fullmatch(session_id)
    if len(session_id) > MAX_ID_CHARS or not is_allowed:
        raise InvalidSession(HEADER, ID_RULE, session_id)

    return session_id


def switched_on(service: Service, name: str, value: str) -> Sessions:
    """Return the sessions of a model. Raises InvalidSession if they are off: the request has
    `value` in the field or header `name`.
    """
    if service.sessions is None:
        raise InvalidSession(
            name, "left out: sessions are off here (option.enable_stateful_sessions)", value
        )

    return service.sessions


async def find_open(sessions: Sessions, session_id: str) -> Session:
    """Return the open session with this id. Raises InvalidSession if there is none, Unavailable if
    it cannot be read now.
    """
    try:
        session = await asyncio.to_thread(sessions.find, session_id)
    except OSError as error:
        # It fails for a moment, as without a free descriptor.
        raise Unavailable(f"the session cannot be read now: {error.strerror}") from None

    if session is None or session.has_expired:
        raise not_open(session_id)

    return session


def not_open(session_id: str) -> LmiError:
    return InvalidSession(
        HEADER, "the id of an open session, and this one is unknown, closed or expired", session_id
    )
