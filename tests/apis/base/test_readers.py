"""An unreadable body is refused with the fault and its place, and is never quoted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lmi.apis.base.body import MARK, MAX_VALUES_BYTES, check_values, read_inputs, read_object
from lmi.apis.base.readers import (
    Reader,
    boolean,
    choice,
    integer,
    json_schema_of,
    number,
    seed,
    strings,
    text,
    token_ids,
)
from lmi.errors import InvalidParameter, LmiError, MalformedRequest

SECRET = b"s3cr3t"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the body is empty"),
        (b" \n", "the body is empty"),
        (b'{"inputs": "s3cr3t",}', "trailing comma is not allowed: line 1 column 20"),
        (
            b'{"inputs": "s3cr3t",\n "parameters": {"top_k": 5,\n}}',
            "trailing comma is not allowed: line 2 column 27",
        ),
        (b'{"s3cr3t": [1, 2,]}', "trailing comma"),
        (b'{"s3cr3t": NaN}', "NaN and Infinity are no JSON numbers: line 1 column 12"),
        (b'{"s3cr3t": Infinity}', "NaN and Infinity are no JSON numbers"),
        (b'{"s3cr3t": -Infinity}', "NaN and Infinity are no JSON numbers"),
        (b'{"s3cr3t": 1e999}', "infinity"),
        (b'{"inputs": "s3cr3t"', "unexpected end"),
        (b"{'inputs': 's3cr3t'}", "line 1 column 2"),
        (b'{"inputs": "s3cr3t"} {}', "unexpected content after document"),
        (MARK, "the body is empty"),
        (MARK + MARK + b'{"inputs": "s3cr3t"}', "byte order mark"),
        ('{"inputs": "s3cr3t"}'.encode("utf-16"), "not valid UTF-8"),
        (b'{"inputs": "s3cr3t \xff"}', "not valid UTF-8"),
        (b'{"inputs": "s3cr3t \\ud800"}', "surrogate"),
        (b'{"inputs": "s3cr3t \xed\xa0\x80"}', "not valid UTF-8"),
        (b'{"s3cr3t": ' + b"[" * 2000 + b"]" * 2000 + b"}", "depth limit"),
        (b'{"s3cr3t": ' * 2000 + b"1" + b"}" * 2000, "depth limit"),
        (b'["s3cr3t"]', "must be a JSON object, not a list"),
        (b'"s3cr3t"', "must be a JSON object, not a string"),
        (b"null", "must be a JSON object, not null"),
        (b"12", "must be a JSON object, not a number"),
        (b"inputs=s3cr3t", "is not JSON"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused_with_the_reason_and_not_quoted(
    body: bytes, words: str
) -> None:
    with pytest.raises(MalformedRequest, match=words) as caught:
        read_object(body)

    assert SECRET.decode() not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            b'{"inputs": "a", "x": [%b1]}' % (b"1," * MAX_VALUES_BYTES),
            "at most 1048576 bytes, not 20971",
        ),
        (b'{"inputs": [%b"a"]}' % (b'"a",' * MAX_VALUES_BYTES), "at most 1048576 bytes"),
        (b'{"inputs": "%b", "inputs": "a"}' % (b"a" * MAX_VALUES_BYTES), "at most 1048576 bytes"),
        (b"[%b1]" % (b"1," * MAX_VALUES_BYTES), "not the JSON of an object"),
        (b'{"inputs": "a", "x": %b' % (b"[" * MAX_VALUES_BYTES), "not the JSON of an object"),
        (b'{"inputs": "a", "x": [%b' % (b"[]," * MAX_VALUES_BYTES), "not the JSON of an object"),
        (b'{"inputs": "a", "%b\xff": 1}' % (b"a" * MAX_VALUES_BYTES), "bytes"),
    ],
)
def test_a_large_body_of_anything_but_text_is_refused_before_it_is_read(
    body: bytes, words: str
) -> None:
    with pytest.raises(MalformedRequest, match=words) as caught:
        check_values(body)

    assert len(str(caught.value)) < 200


def test_a_prompt_may_fill_a_large_body() -> None:
    check_values(b'{"parameters": {"top_k": 5}, "inputs": "%b"}' % (b'a, \\"[{' * MAX_VALUES_BYTES))
    check_values(b'{"text_input": "%b"}' % (b"a" * MAX_VALUES_BYTES))
    check_values(b'{"inputs": [%b"a"]}' % (b'"a",' * 1000))


def test_a_list_of_texts_may_fill_one_where_an_api_has_lists() -> None:
    texts = [b'"%b"' % (b'a \\"' * 5000)] * 128
    body = b'{"prompt": [%b]}' % b",".join(texts)
    check_values(body, max_texts=128)
    for few in (0, 127):
        with pytest.raises(MalformedRequest, match="at most 1048576 bytes"):
            check_values(body, max_texts=few)

    with pytest.raises(MalformedRequest, match="at most 1048576 bytes"):
        check_values(b'{"prompt": [%b1]}' % (b"1," * MAX_VALUES_BYTES), max_texts=128)


def test_the_byte_order_mark_of_utf8_is_skipped_at_the_head_of_a_body() -> None:
    assert read_object(MARK + b'{"a": "\xef\xbb\xbf"}') == {"a": "\ufeff"}
    assert read_inputs(MARK + b"a text", "text/plain") == {"inputs": "a text"}
    check_values(MARK + b'{"text_input": "%b"}' % (b"a" * MAX_VALUES_BYTES))


def test_of_duplicate_keys_the_last_counts() -> None:
    assert read_object(b'{"a": 1, "a": 2}') == {"a": 2}


@given(st.binary(max_size=60))
def test_any_bytes_give_an_object_or_a_refusal(body: bytes) -> None:
    try:
        assert isinstance(read_object(body), dict)
    except MalformedRequest:
        pass


def test_a_text_that_is_not_utf8_is_refused_with_the_place() -> None:
    assert read_inputs("né".encode(), "text/plain; charset=utf-8") == {"inputs": "né"}
    with pytest.raises(MalformedRequest, match="byte 1 is wrong"):
        read_inputs(b"n\xe9", "text/plain")


@pytest.mark.parametrize(
    ("reader", "value", "result"),
    [
        (boolean, False, False),
        (integer(1), 1, 1),
        (integer(1), 2**63 - 1, 2**63 - 1),
        (integer(-1, 5), -1, -1),
        (integer(1), 5.0, 5),
        (integer(-1, 5), -0.0, 0),
        (seed, 7.0, 7),
        (seed, -1, None),
        (seed, -1.0, None),
        (number(0), 5, 5.0),
        (number(0, 1), 1, 1.0),
        (number(0, 1, low_open=True), 1e-9, 1e-9),
        (choice(("json", "sse")), "sse", "sse"),
        (strings(2), ["a", "é" * 512], ("a", "é" * 512)),
        (strings(2), [], ()),
        (token_ids(2), [0, 5], (0, 5)),
        (token_ids(2), [0.0, 5], (0, 5)),
    ],
)
def test_a_reader_gives_the_value_in_its_own_type(
    reader: Reader, value: object, result: object
) -> None:
    value_read = reader("field", value)
    assert (value_read, type(value_read)) == (result, type(result))


@pytest.mark.parametrize(
    ("reader", "value", "rule"),
    [
        (boolean, 1, "true or false, given 1"),
        (boolean, "true", "true or false, given 'true'"),
        (integer(1), True, "an integer, given true"),
        (integer(1), "5", "an integer, given '5'"),
        (integer(1), 5.5, "an integer, given 5.5"),
        (integer(1), 1e30, "an integer of at most 64 bits, given 1e\\+30"),
        (integer(6), 5.0, "at least 6, given 5.0"),
        (seed, -2, "from -1 to 18446744073709551615, given -2"),
        (integer(1), 0, "at least 1, given 0"),
        (integer(1), 2**63, "an integer of at most 64 bits"),
        (integer(1, 16), 17, "from 1 to 16, given 17"),
        (number(), True, "a finite number"),
        (number(), "5", "a finite number"),
        (number(0, 1), 1.5, "at least 0 and at most 1, given 1.5"),
        (number(0, low_open=True), 0, "over 0, given 0"),
        (choice(("json", "sse")), "xml", "one of json, sse, given 'xml'"),
        (choice(("json", "sse")), ["json"], "one of json, sse, given a list of 1"),
        (strings(2), "stop", "a list of strings, given 'stop'"),
        (strings(2), ["a", ""], "a list of non-empty strings, given ''"),
        (strings(2), ["a", 5], "a list of non-empty strings, given 5"),
        (strings(2), ["a"] * 3, "a list of at most 2 strings, given a list of 3"),
        (strings(2), ["é" * 513], "a list of strings of at most 1024 bytes, given "),
        (token_ids(2), [5, -1], r"at least 0, given -1"),
        (token_ids(2), [5, True], r"an integer, given true"),
        (token_ids(2), [5] * 3, "a list of at most 2 token ids, given a list of 3"),
    ],
)
def test_a_reader_refuses_with_the_field_the_rule_and_the_value(
    reader: Reader, value: object, rule: str
) -> None:
    with pytest.raises(InvalidParameter, match=rf"^field(\[1\])? must be {rule}") as caught:
        reader("field", value)

    assert len(str(caught.value)) < 200


JSON: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(value=JSON)
def test_no_reader_ever_fails_in_another_way(value: object) -> None:
    value = read_object(b'{"value": %b}' % json.dumps(value).encode(errors="replace"))["value"]
    for reader in (boolean, integer(), number(), choice(("a",)), strings(2), token_ids(2)):
        try:
            reader("field", value)
        except LmiError as error:
            assert str(error).startswith("field")


@pytest.mark.parametrize(
    "reader",
    [
        boolean,
        text,
        integer(),
        integer(-1, 5),
        number(0, 1, low_open=True),
        choice(("a",)),
        strings(2),
        token_ids(2),
    ],
)
@given(
    value=JSON | st.integers(-2, 6) | st.lists(st.text(max_size=3) | st.integers(0, 5), max_size=3)
)
def test_what_a_reader_takes_is_what_its_json_schema_says(reader: Reader, value: object) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    try:
        reader("field", value)
        is_taken = True
    except LmiError:
        is_taken = False

    is_said = jsonschema.Draft202012Validator(json_schema_of(reader)).is_valid(value)
    assert is_taken == is_said
