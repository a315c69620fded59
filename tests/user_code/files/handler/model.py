"""A handler as the reference's pages describe it: it loads in the first, empty call and answers
with an Output.

This file does not import lmi. The request chooses what the handler does, so that tests can reach
every end of it.
"""

import asyncio
import logging
import os
import time

from djl_python import Input, Output
from djl_python.async_utils import create_stream_chunk_output

logger = logging.getLogger(__name__)


class Service:
    def __init__(self):
        self.initialized = False
        self.num_calls = 0

    def initialize(self, properties):
        self.greeting = properties.get("greeting", "hello")
        self.model_dir = properties["model_dir"]
        self.initialized = True

    def inference(self, inputs):
        self.num_calls += 1
        if inputs.get_property("content-type") == "text/plain":
            return Output().add(inputs.get_as_string().upper())

        data = inputs.get_as_json()
        if inputs.contains_key("image"):
            return Output().add_as_json(
                {"keys": inputs.get_content().keys(), "image": len(inputs.get_as_bytes("image"))}
            )

        act = data.get("act", "greet")
        return getattr(self, act)(data, inputs)

    def greet(self, data, inputs):
        print("greeting", data["name"], flush=True)
        return Output().add_as_json(
            {"answer": f"{self.greeting} {data['name']}", "calls": self.num_calls}
        )

    def whoami(self, data, inputs):
        return Output().add(
            {"pid": os.getpid(), "dir": self.model_dir, "cwd": os.getcwd(), "env": dict(os.environ)}
        )

    def properties(self, data, inputs):
        names = ("X-Amzn-SageMaker-Custom-Attributes", "tenant", "accept")
        return Output().add_as_json({name: inputs.get_property(name) for name in names})

    def teapot(self, data, inputs):
        output = Output(code=418, message="short and stout")
        output.add_property("Content-Type", "application/x-tea")
        output.add_property("x-pot", "blue")
        return output.add(b"\x00\x01tea", key="data")

    def stream(self, data, inputs):
        def words():
            for number in range(data["num_words"]):
                yield f"word{number} "
                time.sleep(data.get("pause_s", 0))
                wait_for(data.get("go_on", "/"))
                if number == data.get("fail_at"):
                    raise RuntimeError("the words ran out")

        output = Output()
        output.add_property("Content-Type", "text/plain")
        return output.add_stream_content(words(), output_formatter=lambda word: word)

    def lines(self, data, inputs):
        return Output().add_stream_content([token] for token in ("a", "b"))

    def chunks(self, data, inputs):
        async def outputs():
            for number in range(data["num"]):
                if number:
                    await asyncio.to_thread(wait_for, data.get("go_on", "/"))

                yield create_stream_chunk_output({"number": number}, number == data.get("last"))

        return outputs()

    def fail(self, data, inputs):
        raise ValueError("no such\nluck")

    def give_up(self, data, inputs):
        ends = {
            "cancel": asyncio.CancelledError(),
            "key": KeyboardInterrupt(),
            "bytes": ValueError("\ud800 bad"),
        }
        ends["memory"] = MemoryError("no room for 8 GB")
        raise ends[data["by"]]

    def odd(self, data, inputs):
        output = Output(code=data.get("code", 200)).add("odd")
        for name, value in data.get("properties", {}).items():
            output.add_property(name, value)

        return output

    def refuse(self, data, inputs):
        return Output().error("the handler refused", code=424)

    def nothing(self, data, inputs):
        return None

    def wrong(self, data, inputs):
        return {"not": "an Output"}

    def sleep(self, data, inputs):
        time.sleep(data["s"])
        wait_for(data.get("go_on", "/"))
        return Output().add("slept")

    def die(self, data, inputs):
        os._exit(7)


def wait_for(path):
    """Go on when a test has made this file."""
    while not os.path.exists(path):
        time.sleep(0.01)


_service = Service()


def handle(inputs: Input) -> Output | None:
    if not _service.initialized:
        _service.initialize(inputs.get_properties())

    if inputs.is_empty():
        return None

    return _service.inference(inputs)
