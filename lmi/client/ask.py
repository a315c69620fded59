"""What asks a server through OpenAI's API: `lmi chat`, `lmi complete`, and `lmi run-batch` for a file of requests."""

import asyncio
import codecs
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, BinaryIO
from uuid import uuid4

import click
import httpx2
import orjson

BUSY = (429, 503)
MAX_TRIES, PAUSE_S = 20, 1.0
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")

QUOTES = '"""'
HELP_WORD, CLEAR_WORD, END_WORD = "/help", "/clear", "/bye"
HELP = f"""\
{HELP_WORD}    show this
{CLEAR_WORD}   forget what was said
{END_WORD}     end, as Ctrl-D does
{QUOTES}      begin and end a text of several lines
Ctrl-C   end an answer, or clear what is typed"""


def base_of(url: str) -> str:
    """Return the URL of a server's OpenAI routes, whether or not `url` names their folder."""
    return f"{url.rstrip('/').removesuffix('/v1')}/v1/"


def headers_of(api_key: str | None) -> dict[str, str]:
    """Return the header with the first of a server's keys."""
    return {"Authorization": f"Bearer {api_key.split(',')[0].strip()}"} if api_key else {}


class Talk:
    """A server and the model of it that answers. Raises ClickException if it does not answer, or refuses."""

    def __init__(self, url: str, model: str | None, api_key: str | None, **parameters: float | None) -> None:
        """`parameters` are fields of each request, as temperature; None leaves one out."""
        self._url = url
        timeout = httpx2.Timeout(5.0, read=None)
        self._client = httpx2.Client(base_url=base_of(url), headers=headers_of(api_key), timeout=timeout)
        self._parameters = {name: value for name, value in parameters.items() if value is not None}
        self._model = model
        if not model:
            with self._asked("GET", "models") as response:
                self._model = str(orjson.loads(response.read())["data"][0]["id"])

    def close(self) -> None:
        self._client.close()

    def chat(self, system_prompt: str | None, quick: str | None) -> None:
        """Answer each line that is typed, or only `quick`, with all that was said before."""
        messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        num_kept = len(messages)

        def clear() -> None:
            del messages[num_kept:]

        for text in [quick] if quick else _typed(clear):
            messages.append({"role": "user", "content": text})
            pieces = self._stream("chat/completions", {"messages": messages})
            said = _show(one["delta"].get("content") or "" for one in pieces)
            messages.append({"role": "assistant", "content": said})

    def complete(self, quick: str | None) -> None:
        """Continue each text that is typed, or only `quick`."""
        for text in [quick] if quick else _typed():
            pieces = self._stream("completions", {"prompt": text})
            _show(one["text"] for one in pieces)

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the choice in each chunk of a streamed answer. Who leaves the loop leaves the answer."""
        fields = {"model": self._model, "stream": True, **self._parameters, **body}
        with self._asked("POST", path, fields) as response:
            for line in response.iter_lines():
                if not line.startswith("data:") or line == "data: [DONE]":
                    continue
                chunk = orjson.loads(line.removeprefix("data:"))
                if "error" in chunk:
                    raise click.ClickException(_message(chunk))
                if waiting := waiting_text(chunk):
                    click.echo(waiting, err=True)
                yield from chunk["choices"]

    def _asked(self, method: str, path: str, body: object = None) -> closing[httpx2.Response]:
        request = self._client.build_request(method, path, json=body)
        try:
            response = self._client.send(request, stream=True)
        except httpx2.TransportError as error:
            raise click.ClickException(f"no server answers at {self._url}: {error}; {_advice(error)}") from None
        if response.status_code != 200:
            raise click.ClickException(f"{response.status_code}: {_message(_read(response.read()))}")
        return closing(response)


def waiting_text(chunk: dict[str, Any]) -> str:
    """Return what a chunk says of an answer that has no token yet, "" for any other chunk."""
    status, progress = chunk.get("queue_status"), chunk.get("prompt_progress")
    known = []
    if status is not None and status["queue_position"] > 0:
        known.append(f"place {status['queue_position']}")
    elif progress is not None and progress["total"]:
        known.append(f"{progress['processed'] / progress['total']:.0%} of the prompt")
    if status is not None and status["estimated_wait_seconds"] is not None:
        known.append(f"about {status['estimated_wait_seconds']:.0f} s")
    return f"waiting: {', '.join(known)}" if known else ""


def _advice(error: Exception) -> str:
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return "SSL_CERT_FILE=FILE names the certificates to trust"
    if isinstance(error, httpx2.RemoteProtocolError):
        return "if it has TLS, its URL begins with https"
    return "`lmi serve` starts one"


def _typed(clear: Callable[[], None] = lambda: None) -> Iterator[str]:
    """Yield the texts that are typed or piped in, until their end or /bye. /clear calls `clear`.

    A text is a line, or all between two `\"\"\"`. Ctrl-C clears what is typed.
    """
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        click.echo(f"{HELP_WORD} shows what else can be typed.")

    while True:
        try:
            line = input("> " if is_terminal else "").strip()
            is_quoted = line.startswith(QUOTES)
            text = _quoted(line.removeprefix(QUOTES), "  " if is_terminal else "") if is_quoted else line
        except EOFError:
            return
        except KeyboardInterrupt:
            click.echo()
            continue

        if line == END_WORD:
            return
        if line == HELP_WORD:
            click.echo(HELP)
        elif line == CLEAR_WORD:
            clear()
        elif text:
            yield text


def _quoted(first: str, prompt: str) -> str:
    """Return the text up to the next three quotes, of which `first` is the first line. The end of all ends it too."""
    lines = [first]
    while not lines[-1].rstrip().endswith(QUOTES):
        try:
            lines.append(input(prompt))
        except EOFError:
            return "\n".join(lines).strip()
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).strip()


def _show(pieces: Iterator[str]) -> str:
    """Print an answer as it comes and return it. Ctrl-C ends it, and the server stops too."""
    said = ""
    try:
        for piece in pieces:
            said += piece
            # What a model says must not command the terminal.
            click.echo("".join(char for char in piece if char.isprintable() or char in "\n\t"), nl=False)
    except KeyboardInterrupt:
        pass
    click.echo()
    return said


def _read(body: bytes) -> Any:
    """Return the JSON of an answer. A proxy may answer with a page, which becomes an error."""
    try:
        return orjson.loads(body)
    except ValueError:
        return {"error": body.decode(errors="replace")}


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message") if isinstance(error, dict) else error or body)


async def run_batch(source: BinaryIO, target: BinaryIO, url: str, api_key: str | None, num_at_once: int) -> int:
    """Ask for every line of `source`, `num_at_once` at a time. Returns how many were not answered with 200.

    A line has the form of OpenAI's batches, `{"custom_id": …, "url": "/v1/chat/completions", "body": …}`. Its answer is
    written when it comes: `{"id": …, "custom_id": …, "response": {"status_code": …, "request_id": …, "body": …},
    "error": null}`. An error says why the server has not answered.
    """
    requests = _requests(source)

    async def ask_on(client: httpx2.AsyncClient) -> int:
        """Take the next line that nobody has taken, and the next after its answer."""
        num_failed = 0
        for asked in requests:
            answer = await _answer(client, asked)
            num_failed += answer["error"] is not None or answer["response"]["status_code"] != 200
            target.write(orjson.dumps(answer) + b"\n")
            target.flush()
        return num_failed

    async with httpx2.AsyncClient(base_url=base_of(url), headers=headers_of(api_key), timeout=None) as client:
        return sum(await asyncio.gather(*(ask_on(client) for _ in range(num_at_once))))


def _requests(source: BinaryIO) -> Iterator[dict[str, Any]]:
    """Yield each line. Raises ClickException for one that is none, with its number."""
    for number, line in enumerate(source, 1):
        if not line.strip():
            continue
        try:
            asked = orjson.loads(line.removeprefix(codecs.BOM_UTF8))  # as PowerShell writes it
            named = {name: asked[name] for name in ("custom_id", "url", "body")}
        except (ValueError, TypeError, KeyError) as error:
            raise click.ClickException(f"line {number}: not a request with custom_id, url and body: {error}") from None
        if named["url"] not in ROUTES:
            raise click.ClickException(f"line {number}: url={named['url']!r}: allowed is {', '.join(ROUTES)}")
        yield named


async def _answer(client: httpx2.AsyncClient, asked: dict[str, Any]) -> dict[str, Any]:
    """Ask again where the server is busy, when it says that it may have room."""
    answer = {"id": f"batch_req_{uuid4().hex}", "custom_id": asked["custom_id"], "response": None, "error": None}
    body = {name: value for name, value in asked["body"].items() if name != "stream"}
    for _ in range(MAX_TRIES):
        try:
            response = await client.post(asked["url"].removeprefix("/v1/"), json=body)
        except httpx2.TransportError as error:
            return answer | {"error": {"code": "server_lost", "message": str(error) or type(error).__name__}}
        if response.status_code not in BUSY:
            break
        try:
            pause_s = float(response.headers.get("Retry-After", PAUSE_S))
        except ValueError:  # a date
            pause_s = PAUSE_S
        await asyncio.sleep(pause_s)
    found = {
        "status_code": response.status_code,
        "request_id": response.headers.get("x-request-id", ""),
        "body": _read(response.content),
    }
    return answer | {"response": found}
