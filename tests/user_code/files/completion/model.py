"""An input formatter that renames a field; an output formatter that looks for the text in an
engine's response.
"""

from djl_python import Input
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import TextGenerationOutput, output_formatter
from djl_python.request_io import TextInput

# Imported and not used, as such files do
__all__ = ["Input", "TextGenerationOutput", "TextInput"]


class MyRequest(TextInput):
    trace_id: str


@input_formatter
def read(decoded_payload, tokenizer=None):
    if "inputPrompt" in decoded_payload:
        decoded_payload["inputs"] = decoded_payload.pop("inputPrompt")

    decoded_payload.setdefault("parameters", {}).setdefault("max_new_tokens", 4)
    return decoded_payload


@output_formatter
def write(response):
    if hasattr(response, "choices") and response.choices:
        choice = response.choices[0]
        if hasattr(choice, "delta") and hasattr(choice.delta, "content"):
            choice.delta.content = "delta"
        elif hasattr(choice, "message") and hasattr(choice.message, "content"):
            choice.message.content = "message"
        elif hasattr(choice, "text"):
            choice.text = choice.text.upper()

    return response
