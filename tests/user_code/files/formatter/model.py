"""Formatters as the reference's pages describe them, found by their decorators; there is no
`handle`.
"""

import json

from djl_python import Input
from djl_python.encode_decode import decode
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import RequestOutput, output_formatter
from djl_python.request_io import RequestInput, TextInput


@input_formatter
def read(input_item: Input, **kwargs) -> RequestInput:
    payload = decode(input_item, input_item.get_property("Content-Type"))
    request = TextInput()
    request.input_text = payload.pop("question")
    request.parameters = payload.pop("options", {})
    request.parameters["stream"] = payload.pop("stream", False)
    return request


@output_formatter
def write(request_output: RequestOutput) -> str:
    best = request_output.sequences[request_output.best_sequence_index]
    token, is_first, is_last = best.get_next_token()
    if request_output.input.parameters.get("fail_at") == token.text:
        raise ValueError(f"cannot write {token.text}")

    result = {"token_id": token.id, "token_text": token.text, "token_log_prob": token.log_prob}
    if is_last:
        result["finish_reason"] = best.finish_reason

    return json.dumps(result) + "\n"
