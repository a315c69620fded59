"""A strict double of `tensorrt_llm`, made from the facts: a call that upstream does not take is
refused here too.

    with double("main-2025-10") as executor_class:
        executor = executor_class(model, config)

It computes: README.md lists the behaviours that it models, and the test that shows each. A server's
process gets it from the folder that `write_double` fills, by PYTHONPATH.
"""

from tests.handlers.trtllm.double.knobs import Knobs, encoded, knobs
from tests.handlers.trtllm.double.loading import double, loaded
from tests.handlers.trtllm.double.package import write_double

__all__ = ["Knobs", "double", "encoded", "knobs", "loaded", "write_double"]
