"""The plan of one request to an endpoint, whole, streamed or asynchronous."""

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.sagemaker_kit.steps import Call, Plan, Refused


def invoke(given: Namespace) -> Plan:
    if given.is_async:
        answer = yield Call("sagemaker-runtime", "InvokeEndpointAsync", _asynchronous(given))
        places = {name: answer[name] for name in ("InferenceId", "OutputLocation", "FailureLocation") if name in answer}
        return [json.dumps(places).encode() + b"\n"]
    parameters = _common(given) | {"Body": _body(given.body)}
    if given.stream:
        answer = yield Call("sagemaker-runtime", "InvokeEndpointWithResponseStream", parameters)
        return _parts(answer)
    answer = yield Call("sagemaker-runtime", "InvokeEndpoint", parameters)
    return answer.get("Body", ())


def _common(given: Namespace) -> dict[str, Any]:
    if given.stream and (given.is_async or given.target_model):
        raise Refused("--stream goes neither with --async nor with --target-model")
    optional = {"TargetModel": given.target_model, "InferenceComponentName": given.component}
    named = {"EndpointName": given.name, "ContentType": given.content_type}
    return named | {name: value for name, value in optional.items() if value}


def _asynchronous(given: Namespace) -> dict[str, Any]:
    if given.target_model or given.component:
        raise Refused("--async goes neither with --target-model nor with --component")
    where = {"InputLocation": given.body} if "://" in given.body else {"Body": _body(given.body)}
    return _common(given) | where


def _body(path: str) -> bytes:
    if "://" in path:
        raise Refused(f"--body takes a file, and {path} only with --async")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise Refused(f"--body {path}: {error.strerror}") from error


def _parts(answer: dict[str, Any]) -> Iterator[bytes]:
    """The bytes of each part as it comes. Parts begin and end anywhere, also inside a character."""
    for event in answer.get("Body", ()):
        yield event["PayloadPart"]["Bytes"]
