"""An input formatter whose object has its own fields, and an output formatter that reads these and
all others.
"""

import json
import sys

from djl_python import Input
from djl_python.encode_decode import decode
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import TextGenerationOutput, output_formatter
from djl_python.request_io import RequestInput, TextInput


class MyInput(TextInput):
    trace_id: str


@input_formatter
def read(input_item: Input, **kwargs) -> RequestInput:
    body = decode(input_item, input_item.get_property("Content-Type"))
    request = MyInput()
    request.input_text = body["question"]
    request.parameters = body.get("parameters", {})
    request.trace_id = body.get("trace", "none")
    request.seen = [kwargs["configs"].greeting, kwargs["properties"]["greeting"]]
    if body.get("count"):
        request.seen.append(len(kwargs["tokenizer"]("four")["input_ids"]))

    return request


@output_formatter
def write(output: TextGenerationOutput) -> str:
    sequence = output.sequences[output.best_sequence_index]
    while sequence.has_next_token():
        token, _, is_last = sequence.get_next_token()

    if not is_last:
        return ""

    request = output.input
    return json.dumps(
        {
            "type": type(request).__name__,
            "trace": request.trace_id,
            "seen": request.seen,
            "text": "".join(token.text for token in sequence.tokens),
            "ids": request.input_ids,
            "prompt": [token.id for token in output.prompt_tokens_details],
            "top": [[token.id for token in tokens] for tokens in sequence.top_tokens],
            "stop_reason": sequence.stop_reason,
            "adapters": request.adapters,
            "decoded": request.tokenizer.decode(request.input_ids)
            if request.parameters.get("stop")
            else None,
            "has_transformers": "transformers" in sys.modules,
        }
    )
