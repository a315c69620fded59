"""Kinds of values: models as djl-serving's start-up arguments name them, words for true
and false.
"""

from __future__ import annotations

import pytest

from lmi.settings.annexes import MODELS, NamedModel
from lmi.settings.kinds import BOOLEAN, WORDS, is_true, local_path


@pytest.mark.parametrize(
    ("text", "models"),
    [
        ("test::MPI=/opt/ml/model", [NamedModel("/opt/ml/model", "test", "MPI")]),
        ("test=file:/opt/ml/model/test", [NamedModel("file:/opt/ml/model/test", "test")]),
        ("test:1:Python:0;1=s3://bucket/a", [NamedModel("s3://bucket/a", "test", "Python")]),
        ("[test:1:Python]=file:///m", [NamedModel("file:///m", "test", "Python")]),
        ("::Python=/m", [NamedModel("/m", "", "Python")]),
        ("/models/a=b", [NamedModel("/models/a=b")]),
        ("relative", [NamedModel("relative")]),
        (
            "a=/a, b::MPI=/b c=/c",
            [NamedModel("/a", "a"), NamedModel("/b", "b", "MPI"), NamedModel("/c", "c")],
        ),
        ("ALL", []),
        ("none", []),
    ],
)
def test_a_model_is_a_name_and_a_place_and_may_say_its_engine(
    text: str, models: list[NamedModel]
) -> None:
    assert list(MODELS.parse(text)) == models


@pytest.mark.parametrize("text", ["", "test=", "a=/a,,"])
def test_an_entry_without_a_place_is_none(text: str) -> None:
    with pytest.raises(ValueError):
        MODELS.parse(text)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:/a/b%20c", "/a/b c"),
        ("file:///a", "/a"),
        ("file:a", "a"),
        ("/a", "/a"),
        ("s3://b/k", "s3://b/k"),
    ],
)
def test_a_url_of_a_file_is_its_path(url: str, path: str) -> None:
    assert local_path(url) == path


@pytest.mark.parametrize("word", WORDS)
def test_a_word_means_true_or_false_in_any_case(word: str) -> None:
    assert (
        is_true(f" {word.upper()} ", not WORDS[word]) == BOOLEAN.parse(word.title()) == WORDS[word]
    )


@pytest.mark.parametrize("text", ["", "2", "maybe"])
def test_another_word_means_what_is_usual(text: str) -> None:
    assert is_true(text, True) and not is_true(text)
