"""Errors that pass between processes, and the words of errors of other libraries."""

from __future__ import annotations

import errno

import msgspec
import pytest

from lmi.errors import (
    CLASSES,
    ErrorInfo,
    GenerationFailed,
    InvalidParameter,
    LmiError,
    ModelUnusable,
    NoMemory,
    Overloaded,
    PromptTooLong,
    Unsupported,
    cause_line,
    from_info,
    is_out_of_memory,
)


def sent(error: LmiError) -> LmiError:
    """The error that comes out of the other end of a socket."""
    return from_info(msgspec.msgpack.decode(msgspec.msgpack.encode(error.info), type=ErrorInfo))


def tree(kind: type[LmiError]) -> list[type[LmiError]]:
    children = [child for child in kind.__subclasses__() if child.__module__ == LmiError.__module__]
    return [kind, *(name for child in children for name in tree(child))]


def example(kind: type[LmiError], field: str | None) -> LmiError:
    return from_info(ErrorInfo(kind.label, "must be at most 8, given 9", field))


def test_no_two_classes_have_one_label() -> None:
    assert sorted(CLASSES.values(), key=repr) == sorted(tree(LmiError), key=repr)


@pytest.mark.parametrize("field", [None, "max_tokens"])
@pytest.mark.parametrize("kind", tree(LmiError), ids=lambda kind: kind.label)
def test_every_error_comes_out_of_a_socket_as_what_it_was(
    kind: type[LmiError], field: str | None
) -> None:
    error = example(kind, field)
    received = sent(error)
    assert type(received) is type(error) is kind
    assert (received.label, received.status) == (kind.label, kind.status)
    assert (received.message, received.field, str(received)) == (error.message, field, str(error))


@pytest.mark.parametrize(
    ("error", "field", "text"),
    [
        (InvalidParameter("top_p", "at most 1", 2), "top_p", "top_p must be at most 1, given 2"),
        (
            PromptTooLong("shorter", "9 tokens"),
            "inputs",
            "inputs must be shorter, given '9 tokens'",
        ),
        (Unsupported("seed", "no seeds"), "seed", "seed is not supported here: no seeds"),
        (Overloaded("9 requests wait"), None, "9 requests wait"),
    ],
)
def test_an_error_that_is_raised_is_the_same_behind_a_socket(
    error: LmiError, field: str | None, text: str
) -> None:
    received = sent(error)
    assert (type(received), received.field, str(received)) == (type(error), field, text)
    assert str(error) == text


def test_the_context_that_a_prompt_is_too_long_for_comes_out_of_a_socket() -> None:
    received = sent(PromptTooLong.of_context(8, "9 tokens"))
    assert isinstance(received, PromptTooLong) and received.max_context == 8
    assert str(received) == (
        "inputs must be shorter than the model's context of 8 tokens, given '9 tokens'"
    )


def test_a_class_from_elsewhere_comes_out_as_its_nearest_base_of_ours() -> None:
    class OwnFailure(GenerationFailed):
        label = "own_failure"

    assert type(sent(OwnFailure("no luck"))) is GenerationFailed


def test_a_label_that_nobody_knows_is_an_internal_error() -> None:
    assert type(from_info(ErrorInfo("from_the_future", "no luck"))) is LmiError


def test_an_api_puts_its_own_name_for_the_field_into_the_text() -> None:
    error = InvalidParameter("max_tokens", "at most 8", 9)
    assert (
        error.spelled({"max_tokens": "max_new_tokens"})
        == "max_new_tokens must be at most 8, given 9"
    )
    assert error.spelled({"must": "may"}) == str(error)


def test_an_error_can_be_sent_whatever_bytes_a_file_name_has() -> None:
    name = b"\xff.json".decode(errors="surrogateescape")
    assert str(sent(GenerationFailed(f"{name} is missing"))) == "?.json is missing"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("first\n  second"), "first second"),
        (MemoryError(), "MemoryError"),
        (ValueError("a" * 200 + "b" * 200), "a" * 148 + " … " + "b" * 148),
    ],
)
def test_the_cause_is_one_line_that_is_never_long(error: Exception, line: str) -> None:
    assert cause_line(error) == line


class OutOfMemoryError(RuntimeError):
    """As torch names it."""


def caused(error: Exception) -> Exception:
    outer = ModelUnusable("the model cannot be loaded")
    outer.__cause__ = error
    return outer


LACK_OF_MEMORY = [
    MemoryError("no room"),
    NoMemory("vLLM cannot start"),
    OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
]


@pytest.mark.parametrize("error", [*LACK_OF_MEMORY, *map(caused, LACK_OF_MEMORY)], ids=repr)
def test_a_lack_of_memory_is_known_by_its_error_and_by_what_caused_it(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), RuntimeError("out of range"), ModelUnusable("torn")]
)
def test_other_errors_are_no_lack_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error) and not is_out_of_memory(caused(error))
