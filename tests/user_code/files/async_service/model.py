"""A handler beside `entryPoint=djl_python.lmi_vllm.vllm_async_service`, which fails in the empty
call.
"""

import json

from djl_python import Input
from djl_python.async_utils import create_non_stream_output
from djl_python.encode_decode import decode

engine = None


async def handle(inputs: Input):
    global engine
    if engine is None:
        engine = {"model": inputs.get_properties().get("model_id", "none")}

    request = inputs.get_batches()[0]
    payload = decode(request, request.get_property("Content-Type"))
    # The first call has plain text, so this line fails in it
    prompt = json.dumps(payload["inputs"]["nested"])
    return create_non_stream_output(
        {"custom_handler_used": True, "generated_text": prompt, **engine}
    )
