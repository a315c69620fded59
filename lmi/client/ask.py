"""What asks a server through OpenAI's API: `lmi chat`, `lmi complete`, and `lmi run-batch` for a
file of requests.
"""

import asyncio
import codecs
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, BinaryIO, NamedTuple
from uuid import uuid4

import click
import httpx2
import orjson

from lmi.client import answers
from lmi.client.answers import Json, OddAnswer
from lmi.errors import shorten
from lmi.shared import log

BUSY = (429, 503)
MAX_TRIES = 20
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")

QUOTES = '"""'
HELP_WORD = "/help"
CLEAR_WORD = "/clear"
END_WORD = "/bye"
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
    if not api_key:
        return {}

    key = api_key.split(",")[0].strip()
    return {"Authorization": f"Bearer {key}"}


class Talk:
    """A server and the model of it that answers. Raises ClickException if it does not answer, or
    refuses.
    """

    def __init__(
        self, url: str, model: str | None, api_key: str | None, **parameters: float | None
    ) -> None:
        """`parameters` are fields of each request, as temperature; None leaves one out."""
        self._url = url
        timeout = httpx2.Timeout(5.0, read=None)
        self._client = httpx2.Client(
            base_url=base_of(url), headers=headers_of(api_key), timeout=timeout
        )
        self._parameters = {name: value for name, value in parameters.items() if value is not None}
        self._model = model
        if not model:
            with self._answers(), self._asked("GET", "models") as response:
                body = answers.whole_of(response.iter_bytes(), is_success=True)
                self._model = answers.first_model_of(body)

    def close(self) -> None:
        """Close the connections to the server."""
        self._client.close()

    def chat(self, system_prompt: str | None, quick: str | None) -> None:
        """Answer each line that is typed, or only `quick`, with all that was said before."""
        messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        num_system_messages = len(messages)

        def clear() -> None:
            del messages[num_system_messages:]

        for text in [quick] if quick else _typed(clear):
            messages.append({"role": "user", "content": text})
            pieces = self._stream("chat/completions", {"messages": messages}, answers.delta_text)
            messages.append({"role": "assistant", "content": _show(pieces)})

    def complete(self, quick: str | None) -> None:
        """Continue each text that is typed, or only `quick`."""
        for text in [quick] if quick else _typed():
            pieces = self._stream("completions", {"prompt": text}, answers.completion_text)
            _show(pieces)

    def _stream(self, path: str, body: Json, text_of: Callable[[Json], str]) -> Iterator[str]:
        """Yield the text of each choice of a streamed answer. A caller that leaves the loop ends
        the answer.
        """
        fields = {"model": self._model, "stream": True, **self._parameters, **body}
        with self._answers(), self._asked("POST", path, fields) as response:
            for line in answers.lines_of(response.iter_bytes()):
                if not line.startswith(b"data:") or line.split() == [b"data:", b"[DONE]"]:
                    continue

                chunk = answers.object_of(line.removeprefix(b"data:"))
                if "error" in chunk:
                    raise click.ClickException(answers.message_of(chunk))

                waiting = answers.waiting_text(chunk)
                if waiting:
                    click.echo(waiting, err=True)

                for choice in answers.choices_of(chunk):
                    yield text_of(choice)

    @contextmanager
    def _answers(self) -> Iterator[None]:
        """Raise ClickException where the server is lost, or where its answer is none of OpenAI's
        API.
        """
        try:
            yield
        except httpx2.TransportError as error:
            raise click.ClickException(
                f"no server answers at {self._url}: {error}; {_advice(error)}"
            ) from None
        except (OddAnswer, httpx2.DecodingError) as error:
            raise click.ClickException(
                f"{self._url} does not answer as OpenAI's API does: {error}"
            ) from None

    def _asked(self, method: str, path: str, body: object = None) -> closing[httpx2.Response]:
        """Return a response of 200, whose body is not read. Raises ClickException for any other."""
        request = self._client.build_request(method, path, json=body)
        response = self._client.send(request, stream=True)
        if response.status_code == 200:
            return closing(response)

        with closing(response):
            body_of_error = answers.whole_of(response.iter_bytes(), is_success=False)
            message = answers.message_of(answers.json_or_page(body_of_error))
            raise click.ClickException(f"{response.status_code}: {message}")


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
    prompt = ""
    prompt_in_quotes = ""
    if is_terminal:
        prompt = "> "
        prompt_in_quotes = "  "
        click.echo(f"{HELP_WORD} shows what else can be typed.")

    while True:
        try:
            line = input(prompt).strip()
            text = line
            if line.startswith(QUOTES):
                text = _quoted(line.removeprefix(QUOTES), prompt_in_quotes)
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
    """Return the text up to the next three quotes, of which `first` is the first line. The end of
    all ends it too.
    """
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
    answer = ""
    try:
        for piece in pieces:
            answer += piece
            # What a model says must not command the terminal.
            printable = "".join(char for char in piece if char.isprintable() or char in "\n\t")
            click.echo(printable, nl=False)
    except KeyboardInterrupt:
        pass

    click.echo()
    return answer


async def run_batch(
    source: BinaryIO,
    target: BinaryIO,
    url: str,
    api_key: str | None,
    num_at_once: int,
    timeout_s: float,
) -> int:
    """Ask for every line of `source`, `num_at_once` at a time, and wait `timeout_s` for each
    answer. Returns how many were not answered with 200.

    A line has the form of OpenAI's batches, `{"custom_id": …, "url": "/v1/chat/completions",
    "body": …}`. Its answer is written when it comes: `{"id": …, "custom_id": …, "response":
    {"status_code": …, "request_id": …, "body": …}, "error": null}`. An error says why the server
    has not answered, or was not asked.
    """
    lines = _lines(source)

    reported_kinds: set[str] = set()

    def tell(kind: str, text: str) -> None:
        """Say on standard error the first of what may be said of every line."""
        if text and kind not in reported_kinds:
            reported_kinds.add(kind)
            click.echo(f"lmi: {log.escape(text)}", err=True)

    async def ask_on(client: httpx2.AsyncClient) -> int:
        """Take the next line that nobody has taken, and the next after its answer."""
        num_failed = 0
        for line in lines:
            tell("line", line.fault)
            answer = await _answer(client, line, timeout_s, tell)
            if answer["error"] is not None or answer["response"]["status_code"] != 200:
                num_failed += 1

            target.write(orjson.dumps(answer) + b"\n")
            target.flush()

        return num_failed

    async with httpx2.AsyncClient(
        base_url=base_of(url), headers=headers_of(api_key), timeout=None
    ) as client:
        workers = [ask_on(client) for _ in range(num_at_once)]
        nums_failed = await asyncio.gather(*workers)
        return sum(nums_failed)


class BatchLine(NamedTuple):
    """A request of a file, or with a `fault` a line that is none."""

    custom_id: Any
    # What follows /v1/.
    path: str = ""
    body: Json = {}
    fault: str = ""


def _lines(source: BinaryIO) -> Iterator[BatchLine]:
    for number, line in enumerate(source, 1):
        if line.strip():
            yield _line_of(line, f"line {number}")


def _line_of(line: bytes, place: str) -> BatchLine:
    rule = "not a request with custom_id, url and body"
    try:
        # PowerShell writes a mark at the beginning.
        fields = orjson.loads(line.removeprefix(codecs.BOM_UTF8))
    except ValueError as error:
        return BatchLine(None, fault=f"{place}: {rule}: {error}")

    try:
        custom_id = fields["custom_id"]
        url = fields["url"]
        body = fields["body"]
    except (TypeError, KeyError) as error:
        custom_id = fields.get("custom_id") if isinstance(fields, dict) else None
        return BatchLine(custom_id, fault=f"{place}: {rule}: {error}")

    if url not in ROUTES:
        return BatchLine(
            custom_id, fault=f"{place}: url={shorten(url)}: allowed is {', '.join(ROUTES)}"
        )

    if not isinstance(body, dict):
        return BatchLine(custom_id, fault=f"{place}: body={shorten(body)}: must be an object")

    body_without_stream = {name: value for name, value in body.items() if name != "stream"}
    return BatchLine(custom_id, url.removeprefix("/v1/"), body_without_stream)


async def _answer(
    client: httpx2.AsyncClient,
    line: BatchLine,
    timeout_s: float,
    tell: Callable[[str, str], None],
) -> Json:
    """Return the answer to a line. A busy server is asked again when it says that it
    may have room, and each time has `timeout_s` for its whole answer.
    """
    answer: Json = {
        "id": f"batch_req_{uuid4().hex}",
        "custom_id": line.custom_id,
        "response": None,
        "error": None,
    }
    if line.fault:
        return answer | {"error": {"code": "invalid_request", "message": line.fault}}

    for _ in range(MAX_TRIES):
        try:
            async with asyncio.timeout(timeout_s):
                async with client.stream("POST", line.path, json=line.body) as response:
                    is_success = response.status_code == 200
                    body = await answers.whole_of_async(response.aiter_bytes(), is_success)
        except TimeoutError:
            message = f"no whole answer in {timeout_s:g} s, as --timeout allows"
            return answer | {"error": {"code": "timeout", "message": message}}
        except httpx2.TransportError as error:
            message = str(error) or type(error).__name__
            return answer | {"error": {"code": "server_lost", "message": message}}
        except (OddAnswer, httpx2.DecodingError) as error:
            return answer | {"error": {"code": "invalid_answer", "message": str(error)}}

        if response.status_code not in BUSY:
            break

        pause_s, warning = answers.pause_of(response.headers)
        tell("pause", warning)
        await asyncio.sleep(pause_s)

    answer["response"] = {
        "status_code": response.status_code,
        "request_id": response.headers.get("x-request-id", ""),
        "body": answers.json_or_page(body),
    }
    return answer
