"""A talk with a server in the terminal, through OpenAI's API: `lmi chat` and `lmi complete`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import click
import httpx2

from lmi.client import answers
from lmi.client.answers import Json, OddAnswer
from lmi.client.server import base_of, headers_of

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


class Talk:
    """A server and the model of it that answers. Its methods raise ClickException if the server
    does not answer, or refuses.
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
        self._model = model or self._first_model()

    def _first_model(self) -> str:
        with self._faults_reported(), self._response("GET", "models") as response:
            body = answers.whole_of(response.iter_bytes(), is_success=True)
            return answers.first_model_of(body)

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
        with self._faults_reported(), self._response("POST", path, fields) as response:
            for line in answers.lines_of(response.iter_bytes()):
                is_end = line.split() == [b"data:", b"[DONE]"]
                if is_end or not line.startswith(b"data:"):
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
    def _faults_reported(self) -> Iterator[None]:
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

    def _response(self, method: str, path: str, body: object = None) -> closing[httpx2.Response]:
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
    """Return what may help a user whose server is lost."""
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
