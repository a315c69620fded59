"""Files written for djl-serving: the arguments of their functions, and what is read from their
return values.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from lmi.user_code.calls import Head
from lmi.user_code.multipart import is_multipart, read_parts
from lmi.user_code.options import UserCodeConfig
from lmi.user_code.runner import UserCode
from tests.user_code.written import model

ROOT = Path(__file__).parents[2]
FILES = Path(__file__).parent / "files"


def answer(model: UserCode, body: bytes = b"{}", **properties: str) -> tuple[Head, bytes]:
    head, *pieces = model.handle(properties, {"q": "1"}, body)
    return head, b"".join(pieces)


def test_djl_python_is_importable_nowhere_else() -> None:
    code = "import lmi.user_code.runner, lmi.server.app, djl_python"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "No module named 'djl_python'" in done.stderr


@pytest.mark.parametrize(
    ("expression", "media_type", "body"),
    [
        ("Output().add(b'\\x00')", "application/octet-stream", b"\x00"),
        ("Output().add('ä')", "text/plain; charset=utf-8", "ä".encode()),
        ("Output().add({'a': 'ä'})", "application/json", '{"a": "ä"}'.encode()),
        ("Output().add([1]).add('second')", "application/json", b"[1]"),
        (
            "Output().add('first').add('the data', key='data')",
            "text/plain; charset=utf-8",
            b"the data",
        ),
        ("Output().add_property('content-type', 'x/y').add('a')", "x/y", b"a"),
        ("Output()", "", b""),
        (
            "Output().add_stream_content(['a', b'b', {'c': 1}], output_formatter=None)",
            "application/octet-stream",
            b'ab{"c": 1}',
        ),
        ("Output().add_stream_content(['a'])", "application/jsonlines", b'{"outputs": "a"}\n'),
    ],
)
def test_an_output_is_a_type_and_a_body(
    tmp_path: Path, expression: str, media_type: str, body: bytes
) -> None:
    source = f"from djl_python import Input, Output\ndef handle(inputs):\n    return {expression}\n"
    head, body_written = answer(model(tmp_path, source, handler="handle"))
    assert (head.status, head.media_type, body_written) == (200, media_type, body)


def test_asynchronous_handlers_and_streams_are_awaited(tmp_path: Path) -> None:
    source = """
from djl_python.outputs import Output
async def words():
    yield "a"
    yield "b"
async def predict(inputs):
    return Output().add_stream_content(words(), str.upper)
"""
    assert answer(model(tmp_path, source, handler="predict"))[1] == b"AB"


def test_an_input_has_the_body_the_query_and_properties_in_any_case(tmp_path: Path) -> None:
    source = """
from djl_python.inputs import Input
from djl_python.outputs import Output
def handle(inputs: Input):
    if inputs.is_empty():
        raise RuntimeError("loaded with " + inputs.get_property("A"))
    content = inputs.get_content()
    return Output().add_as_json([
        inputs.get_as_json(), inputs.get_as_string("q"), inputs.get_property("content-TYPE"), content.keys(),
        inputs.contains_key("data"), inputs.get_property("none"), inputs.get_as_json("none"),
    ])
"""  # noqa: E501
    loaded = model(tmp_path, source, {"a": "b"}, handler="handle")
    _, body = answer(loaded, b'{"x": 1}', **{"Content-Type": "a/b"})
    assert json.loads(body) == [{"x": 1}, "1", "a/b", ["data", "q"], True, None, None]

    with pytest.raises(RuntimeError, match="loaded with b"):
        loaded.begin()


def test_what_ends_an_answer_is_called_also_when_nobody_listens_any_more(tmp_path: Path) -> None:
    source = """
from djl_python import Output
done = []
def handle(inputs):
    return Output().add_stream_content(iter("abc"), None).finalize(done.append, len(done))
"""
    loaded = model(tmp_path, source, handler="handle")
    with closing(loaded.handle({}, {}, b"")) as pieces:
        assert [next(pieces), next(pieces)][1] == b"a"

    answer(loaded)
    assert sys.modules["model"].done == [0, 1]


def test_a_function_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="model.py has no function write"):
        model(tmp_path, "x = 1", output_formatter="write")


@pytest.mark.parametrize(
    "source",
    [
        (
            "def read(payload: dict, tokenizer=None, **kwargs) -> dict: return {'inputs': "
            "payload['q'], **payload}"
        ),
        "def read(decoded_payload): return {'inputs': decoded_payload['q'], **decoded_payload}",
    ],
)
def test_an_input_formatter_of_the_later_signature_gets_and_gives_the_bodys_object(
    tmp_path: Path, source: str
) -> None:
    loaded = model(tmp_path, source, input_formatter="read")
    assert json.loads(loaded.read_input({}, b'{"q": "a"}')[1]) == {"inputs": "a", "q": "a"}


def test_an_input_formatter_makes_a_request_of_a_body() -> None:
    loaded = UserCode(UserCodeConfig(path=str(FILES / "formatter" / "model.py")))
    body = b'{"question": "a", "options": {"max_new_tokens": 3}, "stream": true}'
    assert json.loads(loaded.read_input({"Content-Type": "application/json"}, body)[1]) == {
        "inputs": "a",
        "stream": True,
        "parameters": {"max_new_tokens": 3},
    }


def test_arrays_go_in_and_out(tmp_path: Path) -> None:
    source = """
from djl_python import Output
def handle(inputs):
    [array] = inputs.get_as_numpy()
    return Output().add_as_npz([array + 1])
"""
    import io

    import numpy

    buffer = io.BytesIO()
    numpy.save(buffer, numpy.arange(3))
    head, body = answer(model(tmp_path, source, handler="handle"), buffer.getvalue())
    with numpy.load(io.BytesIO(body)) as arrays:
        assert head.media_type == "tensor/npz" and arrays["arr_0"].tolist() == [1, 2, 3]


MULTIPART = b"".join(
    b'--cut\r\ncontent-disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name, content)
    for name, content in ((b"data", b'{"a": 1}'), (b"image", b"\x89PNG\r\n"))
)


def test_a_multipart_body_reaches_the_handler_in_its_parts(tmp_path: Path) -> None:
    source = """
from djl_python import Output
def handle(inputs):
    return Output().add_as_json([
        inputs.get_content().keys(), inputs.get_as_json(), inputs.get_as_bytes("image").hex(), inputs.get_as_string("q")
    ])
"""  # noqa: E501
    loaded = model(tmp_path, source, handler="handle")
    kind = {"content-type": "multipart/form-data; boundary=cut"}
    _, body = answer(loaded, MULTIPART + b"--cut--\r\n", **kind)
    assert json.loads(body) == [["data", "image", "q"], {"a": 1}, b"\x89PNG\r\n".hex(), "1"]

    with pytest.raises(ValueError, match="ends before its last boundary"):
        answer(loaded, MULTIPART, **kind)


def test_an_input_formatter_reads_the_parts_of_a_multipart_body(tmp_path: Path) -> None:
    source = (
        "def read(form): return {'inputs': str(len(form.get_as_bytes('image'))), "
        "**form.get_as_json('data')}"
    )
    loaded = model(tmp_path, source, input_formatter="read")
    _, request = loaded.read_input(
        {"Content-Type": "multipart/form-data; boundary=cut"}, MULTIPART + b"--cut--"
    )
    assert json.loads(request) == {"inputs": "6", "a": 1}


TYPE = 'multipart/form-data; boundary="cut"'


def part(content: bytes, head: str = 'content-disposition: form-data; name="data"') -> bytes:
    return b"--cut\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n"


@given(st.lists(st.binary().filter(lambda content: b"--cut" not in content), max_size=4))
def test_every_byte_of_every_part_comes_out(contents: list[bytes]) -> None:
    body = b"a preamble\r\n" + b"".join(map(part, contents)) + b"--cut--\r\nan epilogue"
    assert read_parts(body, TYPE) == [("data", content) for content in contents]


def test_parts_have_their_names_files_too() -> None:
    file = (
        'Content-Type: image/png\r\nContent-Disposition: form-data; filename="a.png"; name="größe"'
    )
    body = (
        part(b"\r\n\x00", file)
        + part(b'{"a": 1}', "content-disposition: form-data; name=json")
        + b"--cut--"
    )

    assert read_parts(body, "Multipart/Form-Data; charset=utf-8; boundary=cut") == [
        ("größe", b"\r\n\x00"),
        ("json", b'{"a": 1}'),
    ]


def test_blanks_may_follow_a_boundary() -> None:
    assert read_parts(part(b"a").replace(b"--cut\r\n", b"--cut \t\r\n") + b"--cut--", TYPE) == [
        ("data", b"a")
    ]


@pytest.mark.parametrize(
    ("body", "content_type", "said"),
    [
        (part(b"a") + b"--cut--", "multipart/form-data", "must name its boundary"),
        (b"{}", TYPE, "has no line with its boundary, 'cut'"),
        (b"", TYPE, "has no line with its boundary"),
        (part(b"a"), TYPE, "ends before its last boundary"),
        (b"--cutter\r\n\r\n--cut--", TYPE, "does not end its line"),
        (part(b"a", "content-type: text/plain") + b"--cut--", TYPE, "has no name"),
        (b"--cut\r\nno head--cut\r\n--cut--", TYPE, "has no name"),
    ],
)
def test_what_is_no_form_says_why(body: bytes, content_type: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_parts(body, content_type)


def test_only_forms_are_taken_apart() -> None:
    assert is_multipart("multipart/form-data; boundary=a") and not is_multipart(
        "multipart/mixed; boundary=a"
    )
    assert not is_multipart("") and not is_multipart("application/json")
