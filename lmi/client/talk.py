"""`lmi chat` and `lmi complete`: what a person types goes to a server, and the answer is printed as it comes."""

import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import click
import httpx2
import orjson


def base_of(url: str) -> str:
    """Return the URL of a server's OpenAI routes, whether or not `url` names their folder."""
    return f"{url.rstrip('/').removesuffix('/v1')}/v1/"


def headers_of(api_key: str | None) -> dict[str, str]:
    """Return the header with the first of a server's keys."""
    return {"Authorization": f"Bearer {api_key.split(',')[0].strip()}"} if api_key else {}


class Talk:
    """A server and the model of it that answers. Raises ClickException if it does not answer, or refuses."""

    def __init__(self, url: str, model: str | None, api_key: str | None, temperature: float | None) -> None:
        self._url = url
        self._client = httpx2.Client(
            base_url=base_of(url), headers=headers_of(api_key), timeout=httpx2.Timeout(5.0, read=None)
        )
        self._sampling = {} if temperature is None else {"temperature": temperature}
        self._model = model
        if not model:
            with self._asked("GET", "models") as response:
                self._model = str(orjson.loads(response.read())["data"][0]["id"])

    def chat(self, system_prompt: str | None, quick: str | None) -> None:
        """Answer each line that is typed, or only `quick`, with all that was said before."""
        messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        for text in [quick] if quick else _typed():
            messages.append({"role": "user", "content": text})
            pieces = self._stream("chat/completions", {"messages": messages})
            said = _show(one["delta"].get("content") or "" for one in pieces)
            messages.append({"role": "assistant", "content": said})

    def complete(self, quick: str | None, max_tokens: int) -> None:
        """Continue each line that is typed, or only `quick`."""
        for text in [quick] if quick else _typed():
            pieces = self._stream("completions", {"prompt": text, "max_tokens": max_tokens})
            _show(one["text"] for one in pieces)

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the choice in each chunk of a streamed answer. Who leaves the loop leaves the answer."""
        with self._asked("POST", path, {"model": self._model, "stream": True, **self._sampling, **body}) as response:
            for line in response.iter_lines():
                if not line.startswith("data:") or line == "data: [DONE]":
                    continue
                chunk = orjson.loads(line.removeprefix("data:"))
                if "error" in chunk:
                    raise click.ClickException(_message(chunk))
                yield from chunk["choices"]

    def _asked(self, method: str, path: str, body: object = None) -> closing[httpx2.Response]:
        request = self._client.build_request(method, path, json=body)
        try:
            response = self._client.send(request, stream=True)
        except httpx2.TransportError as error:
            raise click.ClickException(f"no server answers at {self._url}: {error}; {_advice(error)}") from None
        if response.status_code != 200:
            raise click.ClickException(f"{response.status_code}: {_message(orjson.loads(response.read()))}")
        return closing(response)


def _advice(error: Exception) -> str:
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return "SSL_CERT_FILE=FILE names the certificates to trust"
    if isinstance(error, httpx2.RemoteProtocolError):
        return "if it has TLS, its URL begins with https"
    return "`lmi serve` starts one"


def _typed() -> Iterator[str]:
    """Yield what is typed or piped in, line by line, until its end. Ctrl-C clears a line."""
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            click.echo()
            continue
        if line:
            yield line


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


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message") if isinstance(error, dict) else error or body)
