"""One exchange with a client of AWS's API: its answer has the headers of that API, and no others."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

import orjson

from lmi.gateway.errors import AwsError
from lmi.http.exchange import Exchange, Header


class AwsExchange(Exchange):
    def _choose_id(self) -> str:
        return str(uuid.uuid4())

    async def start(self, status: int, media_type: str, headers: Iterable[Header] = ()) -> None:
        """Send the head, without a content type if `media_type` is ""."""
        fields = [("content-type", media_type), ("x-amzn-RequestId", self.request_id), *headers]
        raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in fields if value]
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def send_whole(self, status: int, media_type: str, body: bytes, headers: Iterable[Header] = ()) -> None:
        """Send a whole response with its length."""
        await self.start(status, media_type, [("content-length", str(len(body))), *headers])
        await self.end(body)

    async def send_error(self, error: AwsError) -> None:
        """Send an error. A POST of `/` is AWS JSON 1.1, whose clients read its class in the body."""
        self.error_label = error.kind
        body = error.members | ({"__type": error.kind} if (self.method, self.path) == ("POST", "/") else {})
        await self.send_whole(error.status, "application/json", orjson.dumps(body), [("x-amzn-ErrorType", error.kind)])
