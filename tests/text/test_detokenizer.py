from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, strategies as st

from lmi.executor import SamplingConfig
from lmi.text.answer import Detokenizer
from lmi.text.tokenizer import Tokenizer
from lmi.types import GenerationRequest

# Some are beyond the vocabulary
IDS = st.lists(st.integers(0, 345), max_size=30)
SENTENCEPIECE_IDS = st.lists(st.integers(0, 379), max_size=30)
PROMPT = "The quick"


def stream(tokenizer: Tokenizer, prompt: list[int], ids: list[int], **flags: bool) -> list[str]:
    request = GenerationRequest(max_new_tokens=None, sampling=SamplingConfig(), **flags)
    detokenizer = Detokenizer(tokenizer, request, prompt)
    return [detokenizer.feed(token_id) for token_id in ids] + [detokenizer.flush()]


def whole(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip_special_tokens: bool
) -> str:
    """The text that the library decodes at once from prompt and answer, without the
    prompt's text.
    """
    text = tokenizer.decode(prompt + ids, skip_special_tokens=skip_special_tokens)
    return text.removeprefix(tokenizer.decode(prompt, skip_special_tokens=skip_special_tokens))


@given(ids=IDS, skip=st.booleans())
def test_any_byte_level_tokens_stream_to_the_whole_text(
    byte_level: Tokenizer, ids: list[int], skip: bool
) -> None:
    prompt = byte_level.encode(PROMPT)
    pieces = stream(byte_level, prompt, ids, skip_special_tokens=skip)
    assert "".join(pieces) == whole(byte_level, prompt, ids, skip)


@given(ids=SENTENCEPIECE_IDS, skip=st.booleans())
def test_any_sentencepiece_tokens_stream_to_their_bytes(
    sentencepiece: Tokenizer, ids: list[int], skip: bool
) -> None:
    def data(token_id: int) -> bytes:
        token = sentencepiece.token_name(token_id)
        if skip and token_id in sentencepiece.special_ids:
            return b""

        return bytes([token_id - 3]) if 3 <= token_id < 259 else token.replace("▁", " ").encode()

    prompt = sentencepiece.encode(PROMPT)
    text = "".join(stream(sentencepiece, prompt, ids, skip_special_tokens=skip))
    assert text == b"".join(map(data, ids)).decode(errors="replace")

    if "\ufffd" not in text:
        assert text == whole(sentencepiece, prompt, ids, skip)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "unigram"])
@given(text=st.text(max_size=40))
def test_any_text_streams_to_what_the_library_decodes(
    request: pytest.FixtureRequest, kind: str, text: str
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    prompt = tokenizer.encode(PROMPT)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(stream(tokenizer, prompt, ids)) == whole(tokenizer, prompt, ids, True)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "unigram"])
@given(text=st.text(max_size=40))
def test_behind_a_prompt_without_text_the_answer_stands_at_the_start(
    request: pytest.FixtureRequest, kind: str, text: str
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    prompt = sorted(tokenizer.special_ids)[:1]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(stream(tokenizer, prompt, ids)) == tokenizer.decode(
        ids, skip_special_tokens=True
    )


@given(text=st.text(min_size=1, max_size=20).filter(lambda text: "\ufffd" not in text))
def test_no_piece_holds_half_a_character(byte_level: Tokenizer, text: str) -> None:
    pieces = stream(byte_level, byte_level.encode(PROMPT), byte_level.encode(text))
    assert "\ufffd" not in "".join(pieces)
    assert pieces[-1] == ""


def test_a_character_appears_with_its_last_byte(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("é€😀", add_special_tokens=False)[1:]
    pieces = stream(sentencepiece, sentencepiece.encode(PROMPT), ids)
    assert pieces == ["", "é", "", "", "€", "", "", "", "😀", ""]


def test_half_a_character_at_the_end_is_flushed(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("👀")[:-1]
    assert stream(byte_level, byte_level.encode(PROMPT), ids)[-1] == "\ufffd"


def test_broken_bytes_hold_nothing_back_for_long(byte_level: Tokenizer) -> None:
    lead = byte_level.encode("👀")[0]
    pieces = stream(byte_level, byte_level.encode(PROMPT), [lead] * 50)
    assert pieces == ["", *["\ufffd"] * 50]


def test_a_leading_space_is_kept(sentencepiece: Tokenizer) -> None:
    prompt = sentencepiece.encode("Paris")
    ids = sentencepiece.encode("est Paris", add_special_tokens=False)
    assert "".join(stream(sentencepiece, prompt, ids)) == " est Paris"
    assert "".join(stream(sentencepiece, [], ids)) == "est Paris"


def test_special_tokens_show_when_asked_for(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<|im_end|>\n<tool>Stop<|im_start|>")
    prompt = byte_level.encode(PROMPT)
    assert "".join(stream(byte_level, prompt, ids)) == "\n<tool>Stop"
    pieces_shown = stream(
        byte_level, prompt, ids, skip_special_tokens=False, spaces_between_special_tokens=False
    )
    assert "".join(pieces_shown) == "<|im_end|>\n<tool>Stop<|im_start|>"


def test_spaces_between_special_tokens_follow_the_decoder_or_are_left_out() -> None:
    """A backend without a decoder joins all tokens with spaces."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.add_special_tokens(["<x>", "<y>"])
    tokenizer = Tokenizer(backend)
    pieces = stream(tokenizer, [0], [2, 3, 1, 2, 3], skip_special_tokens=False)
    assert "".join(pieces) == " <x> <y> b <x> <y>"

    pieces = stream(
        tokenizer,
        [0],
        [2, 3, 1, 2, 3],
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
    )

    assert "".join(pieces) == " <x><y> b <x><y>"
