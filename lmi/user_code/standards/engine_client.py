"""What code written for vLLM's app finds in `request.app.state`: `engine_client`, whose `generate`
asks the engines here, and `client`, an HTTP client of this server.

Both ask in the name of the client whose request the code answers, so they work inside a request.
Source: vLLM's documentation of its engine client, and AWS's examples that call it.
"""

import json
import logging
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import httpx
from starlette.exceptions import HTTPException

from lmi.user_code.runner import LazyTokenizer
from lmi.user_code.standards.calls import Broken, Field
from lmi.user_code.standards.conversation import (
    RUNNING_REQUEST,
    Question,
    RunningRequest,
    ServerLost,
)

COMPLETIONS = "/v1/completions"
PING = "/ping"
INSTEAD = (
    "request.app.state.client is an httpx.AsyncClient of this server, so that "
    "await request.app.state.client.post('/v1/chat/completions', json={...}) answers"
)
# Of a client's request, what says who it is. The others are about its body and its session.
OF_CLIENT = frozenset(
    (
        b"authorization",
        b"x-api-key",
        b"api-key",
        b"origin",
        b"host",
        b"x-request-id",
        b"x-llm-d-inference-fairness-id",
        b"x-request-timeout",
        b"x-amzn-sagemaker-adapter-identifier",
    )
)
# The fields of SamplingParams that a completion has too, and what each is if it has no effect.
FIELDS: dict[str, object] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "seed": None,
    "stop": (),
    "stop_token_ids": (),
    "ignore_eos": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "bad_words": (),
}
# These are always sent, because a completion without them has the model's own defaults.
ALWAYS: dict[str, object] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 16}
# Fields that a generate here does not know.
UNKNOWN = ("logprobs", "prompt_logprobs", "logit_bias", "structured_outputs", "guided_decoding")
# More than any context: the engine cuts it to what is left there.
AS_MANY_AS_FIT = 2**31 - 1
# The names of vLLM's kinds of outputs.
DELTA = "DELTA"
FINAL_ONLY = "FINAL_ONLY"
ABORTED = "aborted"


def running_request() -> RunningRequest:
    """Return the request that the running code answers. Raises RuntimeError outside of one."""
    request = RUNNING_REQUEST.get()
    if request is None:
        raise RuntimeError("the engines answer inside a request: no request is being answered here")

    return request


async def asking(
    method: str, path: str, headers: list[Field], body: bytes, query: bytes = b""
) -> Question:
    return await running_request().ask(method, path, query, headers, body)


def headers_of_client() -> list[Field]:
    """Return the headers that say whose request the code answers."""
    headers = running_request().request.headers
    return [(name, value) for name, value in headers if name.lower() in OF_CLIENT]


class EngineClient:
    """Stands for the engine client of vLLM's app."""

    errored = False
    is_running = True
    is_stopped = False

    def __init__(self, folder: str) -> None:
        self._tokenizer = LazyTokenizer(folder)
        # By the ids that the code gave.
        self._running: dict[str, Question] = {}

    async def generate(
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        lora_request: Any = None,
        **ignored: Any,
    ) -> AsyncIterator[Any]:
        """Yield the request's output again and again as it grows, as vLLM does.

        A refusal of the server, as of a full queue, is an HTTPException with its status and words.
        """
        body = completion(prompt, sampling_params, lora_request)
        headers = [*headers_of_client(), (b"content-type", b"application/json")]
        question = await asking("POST", COMPLETIONS, headers, json.dumps(body).encode())
        self._running[request_id] = question
        try:
            answer = await question.answer()
            if answer.status != 200:
                raise HTTPException(answer.status, _message_of(await answer.body()))

            text = prompt if isinstance(prompt, str) else body.get("prompt")
            output = GeneratedOutput(request_id, text, body["n"], lora_request)
            kind = getattr(getattr(sampling_params, "output_kind", None), "name", "")
            async for event in _events(answer.parts):
                output.add(event)
                if kind != FINAL_ONLY or output.is_finished:
                    yield output.delta(event) if kind == DELTA else output.whole()
        except ServerLost as error:
            if str(error) != ABORTED:
                raise
        finally:
            question.close()
            # Another request may have the same id by now.
            if self._running.get(request_id) is question:
                del self._running[request_id]

    async def abort(self, request_id: Any, *ignored: Any, **more: Any) -> None:
        """Stop a `generate` with this id, or those with these ids."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        for name in ids:
            question = self._running.pop(name, None)
            if question is not None:
                question.take(Broken(0, ABORTED))
                question.close()

    async def check_health(self) -> None:
        """Raise RuntimeError with the reason if no engine can serve."""
        question = await asking("GET", PING, headers_of_client(), b"")
        answer = await question.answer()
        body = await answer.body()
        if answer.status != 200:
            raise RuntimeError(f"the engines do not serve: {body.decode(errors='replace')}")

    async def is_tracing_enabled(self) -> bool:
        return False

    async def get_tokenizer(self, *ignored: Any) -> Any:
        """Return the tokenizer of transformers, which is loaded when it is first used."""
        return self._tokenizer

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"engine_client.{name} is not here: it has generate, abort, check_health and "
            f"get_tokenizer; {INSTEAD}"
        )


class NotHere:
    """Stands for an object of vLLM's app that is not here, and says what to call instead."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        raise AttributeError(f"app.state.{self._name}.{name} is not here: {INSTEAD}")


class ServerTransport(httpx.AsyncBaseTransport):
    """Passes the requests of an httpx client to this server, with the rights of the client whose
    request the code answers.
    """

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        headers = [(name.lower(), value) for name, value in request.headers.raw if name != b"Host"]
        names = {name for name, _ in headers}
        for name, value in headers_of_client():
            if name not in names:
                headers.append((name, value))

        path = request.url.path
        question = await asking(request.method, path, headers, body, request.url.query)
        answer = await question.answer()
        stream = AnswerStream(question, answer.parts)
        return httpx.Response(answer.status, headers=answer.headers, stream=stream)


class AnswerStream(httpx.AsyncByteStream):
    def __init__(self, question: Question, parts: AsyncIterator[bytes]) -> None:
        self._question = question
        self._parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._parts:
            yield part

    async def aclose(self) -> None:
        self._question.close()


def server_client() -> httpx.AsyncClient:
    """Return a client whose requests go to this server, within the request that is answered."""
    # It would write a line for each of them.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    return httpx.AsyncClient(transport=ServerTransport(), base_url="http://lmi", timeout=None)


class GeneratedOutput:
    """The output of one request as it grows."""

    def __init__(self, request_id: str, prompt: object, num_choices: int, lora: Any) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._lora = lora
        self._prompt_token_ids: list[int] = []
        self._choices = [GeneratedSequence(index) for index in range(num_choices)]

    @property
    def is_finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self._choices)

    def add(self, event: Mapping[str, Any]) -> None:
        for part in event["choices"]:
            self._prompt_token_ids = part.get("prompt_token_ids") or self._prompt_token_ids
            self._choices[part["index"]].add(part)

    def whole(self) -> SimpleNamespace:
        return self._output([choice.whole() for choice in self._choices])

    def delta(self, event: Mapping[str, Any]) -> SimpleNamespace:
        return self._output([self._choices[part["index"]].delta(part) for part in event["choices"]])

    def _output(self, outputs: list[SimpleNamespace]) -> SimpleNamespace:
        return SimpleNamespace(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=list(self._prompt_token_ids),
            prompt_logprobs=None,
            outputs=outputs,
            finished=self.is_finished,
            metrics=None,
            lora_request=self._lora,
        )


class GeneratedSequence:
    """One sequence of an output."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._text = ""
        self._token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._stop_reason: str | int | None = None

    def add(self, part: Mapping[str, Any]) -> None:
        self._text += part["text"]
        self._token_ids += part.get("token_ids") or []
        self.finish_reason = part.get("finish_reason")
        self._stop_reason = part.get("stop_reason")

    def whole(self) -> SimpleNamespace:
        return self._completion(self._text, list(self._token_ids))

    def delta(self, part: Mapping[str, Any]) -> SimpleNamespace:
        return self._completion(part["text"], part.get("token_ids") or [])

    def _completion(self, text: str, token_ids: list[int]) -> SimpleNamespace:
        return SimpleNamespace(
            index=self._index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=None,
            logprobs=None,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            finished=lambda: self.finish_reason is not None,
        )


def completion(prompt: Any, params: Any, lora_request: Any) -> dict[str, Any]:
    """Return the body of a completion that asks for the same as a `generate`. Raises ValueError for
    what it cannot ask for.
    """
    for name in UNKNOWN:
        if getattr(params, name, None) is not None:
            raise ValueError(f"engine_client.generate does not know {name} here: {INSTEAD}")

    body: dict[str, Any] = {
        "prompt": _prompt_of(prompt),
        "n": 1,
        "stream": True,
        "return_token_ids": True,
    }
    for name, default in ALWAYS.items():
        body[name] = getattr(params, name, default)

    if body["max_tokens"] is None:
        body["max_tokens"] = AS_MANY_AS_FIT

    for name, harmless in FIELDS.items():
        value = getattr(params, name, None)
        if value is not None and value != harmless and value != []:
            body[name] = value

    adapter = getattr(lora_request, "lora_name", None)
    if adapter is not None:
        body["model"] = adapter

    return body


def _prompt_of(prompt: Any) -> Any:
    """Return the text or the token ids of a prompt as vLLM takes it: a str, a list of ids, or a
    dict with one of them.
    """
    if isinstance(prompt, Mapping):
        if prompt.get("multi_modal_data"):
            raise ValueError(f"engine_client.generate takes no images here: {INSTEAD}")

        prompt = prompt.get("prompt_token_ids") or prompt.get("prompt")

    if not isinstance(prompt, str | list):
        raise ValueError(
            "the prompt of engine_client.generate must be a str or a list of token ids"
        )

    return prompt


async def _events(parts: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Yield the objects of a stream of server-sent events. Raises HTTPException for an error in
    it.
    """
    buffer = b""
    async for part in parts:
        buffer += part
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if not data.startswith(b"{"):
                continue

            event = json.loads(data)
            error = event.get("error")
            if error:
                raise HTTPException(int(error.get("code") or 500), str(error.get("message", error)))

            if event.get("choices"):
                yield event


def _message_of(body: bytes) -> str:
    """Return the words of an error in OpenAI's form, or the body as it is."""
    text = body.decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text
