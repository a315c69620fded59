"""An output formatter that handles an object like pydantic's and a line of server-sent events."""

import json

from djl_python.output_formatter import output_formatter


@output_formatter
def write(output, **kwargs):
    if hasattr(output, "model_dump"):
        output.tenant = "blue"
        return output

    if isinstance(output, str) and output.startswith("data: "):
        return f"data: {json.dumps({'tenant': 'blue'})}"

    return output
