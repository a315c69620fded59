"""An output formatter as today's pages describe it: it gets the response, as a dict or as an
object.
"""

import json

from djl_python.output_formatter import output_formatter


@output_formatter
def write(response_data: dict) -> dict:
    choice = response_data.choices[0]
    assert choice.text == response_data["choices"][0]["text"] and "choices" in response_data
    if "generated_text" in response_data:
        response_data["original_length"] = len(response_data["generated_text"])

    choice.text = f"[{choice.text}]"
    response_data.num_keys = len(dict(response_data))
    json.dumps(response_data)
    return response_data
