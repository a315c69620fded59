"""A function in place of a model: it hides the addresses of e-mail in a text."""

import re

from djl_python import Input, Output

ADDRESS = re.compile(r"[\w.+-]+@[\w-]+(\.[\w-]+)+")


def handle(inputs: Input) -> Output | None:
    if inputs.is_empty():  # the first call, before any request: here a handler loads what it needs
        return None

    text, count = ADDRESS.subn("…", inputs.get_as_json()["text"])
    return Output().add_as_json({"text": text, "num_addresses": count})
