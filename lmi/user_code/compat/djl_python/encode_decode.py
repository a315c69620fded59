"""Decode a body and encode a prediction, by content type."""

from typing import Any

from djl_python.inputs import Input
from djl_python.outputs import Output


def decode(inputs: Input, content_type: str | None = None, key: str | int | None = None) -> Any:
    """Return the value of a JSON body (the default). Any other body becomes `{"inputs": ...}`,
    plain text in a list.
    """
    kind = (content_type or "application/json").lower()
    if "application/json" in kind:
        return inputs.get_as_json(key) if inputs.get_as_bytes(key) else {"inputs": ""}

    if "text/csv" in kind:
        return {"inputs": inputs.get_as_csv(key)}

    if "text/plain" in kind:
        return {"inputs": [inputs.get_as_string(key)]}

    if kind.startswith("image/"):
        return {"inputs": inputs.get_as_image(key)}

    if "tensor/npz" in kind or "tensor/npy" in kind:
        return {"inputs": inputs.get_as_numpy(key)}

    return {"inputs": inputs.get_as_bytes(key)}


def encode(
    outputs: Output, prediction: Any, accept: str | None = None, key: str | None = None
) -> None:
    """Add a prediction to the outputs in the form that `accept` asks for: npz, npy, else JSON."""
    wanted = (accept or "").lower()
    if "tensor/npz" in wanted:
        outputs.add_as_npz(prediction if isinstance(prediction, list) else [prediction], key)
    elif "tensor/npy" in wanted:
        outputs.add_as_numpy(prediction, key)
    else:
        outputs.add_as_json(prediction, key)
