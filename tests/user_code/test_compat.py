"""The names that files written for djl-serving import: parts that work, and stubs that say what is
missing.
"""

from __future__ import annotations

import importlib
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lmi.user_code.calls import Head
from lmi.user_code.options import UserCodeConfig
from lmi.user_code.runner import UserCode

FILES = Path(__file__).parent / "files"


def user_code(path: Path, properties: dict[str, str]) -> UserCode:
    return UserCode(UserCodeConfig(path=str(path), handler="handle", properties=properties))


def model(tmp_path: Path, source: str, **properties: str) -> UserCode:
    (tmp_path / "model.py").write_text("from djl_python import Input, Output\n" + source)
    return user_code(tmp_path / "model.py", properties)


def answer(loaded: UserCode, body: bytes = b"{}", **properties: str) -> tuple[Head, list[bytes]]:
    head, *pieces = loaded.handle(properties, {}, body)
    return head, pieces


@pytest.mark.parametrize(
    "path",
    [
        "huggingface.HuggingFaceService",
        "tensorrt_llm.TRTLLMService",
        "transformers_neuronx.TransformersNeuronXService",
        "streaming_utils.StreamingUtils",
        "rolling_batch.neuron_rolling_batch.NeuronRollingBatch",
        "rolling_batch.rolling_batch.RollingBatch",
        "properties_manager.tnx_properties.TransformerNeuronXProperties",
        "properties_manager.hf_properties.HuggingFaceProperties",
        "session_utils.SessionUtils",
    ],
)
def test_what_is_not_here_can_be_imported_made_and_inherited_from_and_says_so_when_used(
    path: str,
) -> None:
    module, _, name = f"djl_python.{path}".rpartition(".")
    stub = getattr(importlib.import_module(module), name)
    model_stub = stub({"model_id": "m"}, tensor_parallel_degree=2)

    class Mine(stub):  # type: ignore[misc]
        def inference(self, inputs: object) -> Any:
            return super().inference(inputs)

    for use in (
        lambda: model_stub.initialized,
        lambda: stub.get_it(1),
        lambda: Mine().inference(None),
        lambda: model_stub(1),
    ):
        with pytest.raises(
            NotImplementedError, match=rf"^djl_python\..*{name} is not here: lmi [^.]*\b"
        ):
            use()


def test_functions_that_are_not_here_say_so_when_they_are_called() -> None:
    from djl_python.huggingface import _service, handle  # type: ignore[import-not-found]

    with pytest.raises(NotImplementedError, match="huggingface.handle is not here"):
        handle(None)

    with pytest.raises(NotImplementedError, match="huggingface._service is not here"):
        _service.inference(None)


def test_a_module_that_nobody_has_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("djl_python.huggingfaces")


def test_a_file_that_imports_services_and_uses_none_runs(tmp_path: Path) -> None:
    source = """
from djl_python.huggingface import HuggingFaceService
from djl_python.tensorrt_llm import TRTLLMService
_service = HuggingFaceService()
def handle(inputs):
    return Output().add(inputs.get_as_json()["text"]) if "text" in inputs.get_as_json() else _service.inference(inputs)
"""  # noqa: E501
    loaded = model(tmp_path, source)
    assert answer(loaded, b'{"text": "a"}')[1] == [b"a"]

    with pytest.raises(
        NotImplementedError,
        match="HuggingFaceService is not here: lmi serves models by its own engines",
    ):
        answer(loaded)


def test_handlers_of_scikit_learn_are_imported_and_said_to_be_unused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = """
from djl_python.input_parser import init_handler, input_formatter, prediction_handler
@init_handler
def load(model_dir): pass
@prediction_handler
def predict(x, model): pass
def handle(inputs): return Output()
"""
    model(tmp_path, source)

    assert "load is never called here, it is for scikit-learn and XGBoost" in caplog.text
    assert "predict is never called here" in caplog.text


def test_a_batch_is_the_one_request_also_in_the_first_call(tmp_path: Path) -> None:
    source = """
from djl_python.encode_decode import decode
seen = []
async def handle(inputs):
    [item] = inputs.get_batches()
    seen.append((inputs.get_batch_size(), decode(item, item.get_property("Content-Type"))["inputs"]))
    return Output().add_as_json(seen)
"""  # noqa: E501
    loaded = model(tmp_path, source)
    loaded.begin()

    assert json.loads(answer(loaded, b'{"inputs": "a"}')[1][0]) == [[1, ""], [1, "a"]]


def test_arrays_are_added_by_the_references_name_of_the_parameter(tmp_path: Path) -> None:
    source = """
import numpy
def handle(inputs):
    output = Output()
    getattr(output, inputs.get_property("add"))(np_list=[numpy.arange(2)], key="data")
    return output
"""
    loaded = model(tmp_path, source)
    assert answer(loaded, add="add_as_numpy")[0].media_type == "tensor/npy"
    assert answer(loaded, add="add_as_npz")[0].media_type == "tensor/npz"


STREAMED = """
import json
from djl_python.async_utils import create_non_stream_output, create_stream_chunk_output, handle_streaming_response
async def words(texts):
    for text in texts:
        yield text
def write(chunk, history=None, **named):
    if chunk == "bad":
        raise ValueError("cannot write bad")
    return json.dumps({"token": chunk}), chunk == named["end"]
def write_all(chunk, history, **named):
    return json.dumps(history + [chunk]), False, history + [chunk]
async def handle(inputs):
    if inputs.is_empty():
        return None
    asked = inputs.get_as_json()
    if "text" in asked:
        return create_non_stream_output({"text": asked["text"]}, properties={"x-a": "b"})
    if "error" in asked:
        return create_non_stream_output("", error=asked["error"], code=asked.get("code"))
    formatter, keeps = (write_all, True) if asked.get("keeps") else (write, False)
    return handle_streaming_response(words(asked["words"]), formatter, accumulate_chunks=keeps, end="c")
"""  # noqa: E501


def test_an_asynchronous_handler_answers_whole(tmp_path: Path) -> None:
    loaded = model(tmp_path, STREAMED)
    loaded.begin()
    head, pieces = answer(loaded, '{"text": "ä"}'.encode())

    assert head == Head(200, "application/json", {"x-a": "b"}) and pieces == [
        '{"text": "ä"}\n'.encode()
    ]

    head, pieces = answer(loaded, b'{"error": "no luck", "code": 429}')
    assert head.status == 429 and [json.loads(piece) for piece in pieces] == [
        {"error": "no luck", "code": 429}
    ]
    assert answer(loaded, b'{"error": "no luck"}')[0].status == 424


def test_an_asynchronous_generator_of_outputs_is_a_stream_until_the_last(tmp_path: Path) -> None:
    loaded = model(tmp_path, STREAMED)
    head, pieces = answer(loaded, b'{"words": ["a", "b", "c", "d"]}')
    assert head == Head(200, "application/jsonlines", {}, is_streaming=True)
    assert pieces == [b'{"token": "a"}\n', b'{"token": "b"}\n', b'{"token": "c"}\n']
    assert answer(loaded, b'{"words": ["a", "b"], "keeps": 1}')[1] == [b'["a"]\n', b'["a", "b"]\n']
    _, (first, last) = answer(loaded, b'{"words": ["a", "bad", "c"]}')
    assert json.loads(last) == {"error": "cannot write bad", "code": 424}


@pytest.mark.parametrize("define", ["async def", "def"])
def test_a_handler_may_be_a_generator_itself(tmp_path: Path, define: str) -> None:
    source = f"""
ended = []
{define} handle(inputs):
    try:
        for text in ("a", "b", "c"):
            yield Output().add_property("content-type", "text/plain").add(text)
    finally:
        ended.append(text)
"""
    loaded = model(tmp_path, source)
    assert answer(loaded) == (Head(200, "text/plain", {}, is_streaming=True), [b"a", b"b", b"c"])

    with closing(loaded.handle({}, {}, b"")) as pieces:
        assert [next(pieces), next(pieces)] == [
            Head(200, "text/plain", {}, is_streaming=True),
            b"a",
        ]

    assert loaded._handle.__globals__["ended"] == ["c", "a"], "a client that left ends it"


@pytest.mark.parametrize("define", ["async def", "def"])
def test_what_a_generator_yields_must_be_an_output(tmp_path: Path, define: str) -> None:
    loaded = model(
        tmp_path, f"{define} handle(inputs):\n    yield Output().add('a')\n    yield 'b'\n"
    )
    with closing(loaded.handle({}, {}, b"")) as pieces:
        assert [next(pieces), next(pieces)][1] == b"a"
        with pytest.raises(TypeError, match="handle must return an Output or None, not str"):
            next(pieces)


def test_all_calls_share_one_event_loop(tmp_path: Path) -> None:
    source = """
import asyncio
loops = []
async def handle(inputs):
    loops.append(asyncio.get_running_loop())
    return Output().add_as_json(len(set(map(id, loops))))
"""
    loaded = model(tmp_path, source)
    loaded.begin()
    assert answer(loaded)[1] == answer(loaded)[1] == [b"1"]


FAILS_EMPTY = "def handle(inputs):\n    return Output().add(inputs.get_content().value_at(0))\n"


def test_a_first_call_that_fails_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(IndexError):
        model(tmp_path, FAILS_EMPTY, async_mode="true").begin()


def test_beside_a_service_of_the_reference_a_handler_need_not_expect_the_first_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = model(tmp_path, FAILS_EMPTY, entryPoint="djl_python.lmi_vllm.vllm_async_service")
    loaded.begin()
    assert "the first call of handle, without content, failed" in caplog.text
    assert answer(loaded, b"body")[1] == [b"body"]


def test_a_handler_for_a_service_of_the_reference_loads_in_the_first_call_and_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = {
        "entryPoint": "djl_python.lmi_vllm.vllm_async_service",
        "async_mode": "true",
        "model_id": "mine",
    }
    loaded = user_code(FILES / "async_service" / "model.py", options)
    loaded.begin()
    assert "TypeError" in caplog.text

    head, [body] = answer(loaded, b'{"inputs": {"nested": 1}}')
    assert (head.status, head.media_type) == (200, "application/json")
    assert json.loads(body) == {"custom_handler_used": True, "generated_text": "1", "model": "mine"}


def test_a_handler_that_goes_through_a_batch_answers_its_one_request() -> None:
    loaded = user_code(FILES / "batch" / "model.py", {})
    loaded.begin()
    assert answer(loaded, b'{"inputs": "a"}') == (
        Head(200, "text/plain; charset=utf-8", {"num": "1"}),
        [b"A"],
    )
