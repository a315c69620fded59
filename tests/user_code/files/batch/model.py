"""A handler that loops over a batch of requests, as handlers for rolling batches do."""

from djl_python import Input, Output


def handle(inputs: Input) -> Output | None:
    if inputs.is_empty():
        return None

    outputs = Output()
    outputs.add_property("num", str(inputs.get_batch_size()))
    for i, batch_item in enumerate(inputs.get_batches()):
        outputs.add(batch_item.get_as_json()["inputs"].upper(), key="data", batch_index=i)

    return outputs
