"""Own forms of request and answer around a model: {"question": "…"} is answered {"answer": "…"}."""

import json

from djl_python import Input
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import output_formatter
from djl_python.request_io import RequestInput, TextInput


@input_formatter
def read(inputs: Input, **kwargs) -> RequestInput:
    request = TextInput()
    request.input_text = inputs.get_as_json()["question"]
    request.parameters = {"max_new_tokens": 20}
    return request


@output_formatter
def write(answer) -> str:
    return json.dumps({"answer": answer.generated_text})
