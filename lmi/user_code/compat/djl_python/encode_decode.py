"""Decode a body and encode a prediction, by content type."""

from typing import Any

from djl_python.inputs import Input
from djl_python.outputs import Output


def decode(inputs: Input, content_type: str | None = None, key: str | int | None = None) -> Any:
    """Return the value of a JSON body (the default). Any other body becomes `{"inputs": ...}`,
    plain text in a list.
    """
    media_type = (content_type or "application/json").lower()
    if "application/json" in media_type:
        if not inputs.get_as_bytes(key):
            return {"inputs": ""}

        return inputs.get_as_json(key)

    if "text/csv" in media_type:
        return {"inputs": inputs.get_as_csv(key)}

    if "text/plain" in media_type:
        return {"inputs": [inputs.get_as_string(key)]}

    if media_type.startswith("image/"):
        return {"inputs": inputs.get_as_image(key)}

    if "tensor/npz" in media_type or "tensor/npy" in media_type:
        return {"inputs": inputs.get_as_numpy(key)}

    return {"inputs": inputs.get_as_bytes(key)}


def encode(
    outputs: Output, prediction: Any, accept: str | None = None, key: str | None = None
) -> None:
    """Add a prediction to the outputs in the form that `accept` asks for: npz, npy, else JSON."""
    media_types = (accept or "").lower()
    if "tensor/npz" in media_types:
        arrays = prediction if isinstance(prediction, list) else [prediction]
        outputs.add_as_npz(arrays, key)
    elif "tensor/npy" in media_types:
        outputs.add_as_numpy(prediction, key)
    else:
        outputs.add_as_json(prediction, key)
