"""The defaults of a model's generation_config.json and of its operator: which of them count, and
what is told.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.json import decode, encode

from lmi.apis.base.parameters import ROWS
from lmi.errors import InvalidParameter
from lmi.settings.config import Config, GenerationDefaults
from lmi.settings.generation import FAULTS, MAX_FILE_BYTES
from tests.settings.settling import faults, settle
from tests.settings.test_secure_mode import PICKLES, refusal, secured

FILE = "generation_config.json"
QWEN = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "eos_token_id": [1, 2],
    "min_p": None,
}
KEPT = GenerationDefaults(temperature=0.6, top_p=0.95, top_k=20, source=FILE)


def write(folder: Path, written: Any) -> Path:
    file = folder / FILE
    file.write_bytes(written if isinstance(written, bytes) else json.dumps(written).encode())
    return file


def defaults(folder: Path, text: str = "") -> GenerationDefaults:
    return settle(folder, text).config.model.generation_defaults


def test_the_values_of_the_models_file_count_and_a_note_tells_them(folder: Path) -> None:
    write(folder, QWEN)
    resolved = settle(folder)
    assert resolved.config.model.generation_defaults == KEPT
    assert decode(encode(resolved.config), type=Config) == resolved.config
    assert resolved.warnings == ()
    [note] = [note for note in resolved.notes if FILE in note]
    assert note.startswith(f"{FILE}: temperature 0.6, top_p 0.95, top_k 20 where a request")


def test_every_parameter_of_a_request_may_have_a_default(folder: Path) -> None:
    values = {
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 5,
        "min_p": 0.5,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "max_new_tokens": 5,
    }
    assert values.keys() == FAULTS.keys()

    write(folder, values)
    assert defaults(folder).values == values


def test_a_model_without_the_file_has_no_defaults_and_nothing_is_told(folder: Path) -> None:
    resolved = settle(folder)
    assert resolved.config.model.generation_defaults == GenerationDefaults()
    assert not any("generation" in line for line in (*resolved.notes, *resolved.warnings))


@pytest.mark.parametrize("word", ["vllm", "lmi", "LMI"])
def test_the_file_does_not_count_where_the_defaults_of_the_apis_are_asked_for(
    folder: Path, word: str
) -> None:
    write(folder, QWEN)
    assert defaults(folder, f"option.generation_config={word}") == GenerationDefaults()
    write(folder, b"{")
    assert settle(folder, f"option.generation_config={word}").warnings == ()


@pytest.mark.parametrize("path", ["{}", "{}/generation_config.json", "../other", "other"])
def test_another_folder_or_its_file_counts_in_place_of_the_models(folder: Path, path: str) -> None:
    elsewhere = folder.parent / "other"
    elsewhere.mkdir()
    write(elsewhere, {"temperature": 0.25})
    write(folder, QWEN)
    defaults_found = defaults(folder, f"option.generation_config={path.format(elsewhere)}")
    assert (defaults_found.values, Path(defaults_found.source).resolve()) == (
        {"temperature": 0.25},
        elsewhere / FILE,
    )


def test_a_path_without_a_file_that_can_be_read_ends_the_start(folder: Path) -> None:
    [line] = faults(folder, "option.generation_config=nowhere")
    assert line.startswith(
        "option.generation_config='nowhere' (serving.properties:1): allowed is auto, vllm, lmi, or "
        "a"
    )
    assert line.endswith("nowhere is no file)")
    write(folder, b"{")
    [line] = faults(folder, f"option.generation_config={folder / FILE}")
    assert "allowed is auto" in line and "line 1 column 2" in line


def test_single_values_replace_those_of_the_file_and_null_replaces_nothing(folder: Path) -> None:
    write(folder, QWEN)
    text = 'option.override_generation_config={"temperature": 0.1, "min_p": 0.05, "top_k": null}'

    assert defaults(folder, text) == GenerationDefaults(
        temperature=0.1,
        top_p=0.95,
        top_k=20,
        min_p=0.05,
        source=f"{FILE}, option.override_generation_config",
    )

    alone = defaults(folder, f"{text}\noption.generation_config=vllm")
    assert alone.values == {"temperature": 0.1, "min_p": 0.05}


def test_a_number_of_tokens_bounds_every_request_where_the_operator_has_written_it(
    folder: Path,
) -> None:
    write(folder, {"max_new_tokens": 7})
    of_maker = defaults(folder)
    assert (of_maker.max_new_tokens, of_maker.server_max_new_tokens) == (7, None)
    of_operator = defaults(folder, f"option.generation_config={folder}")
    assert (of_operator.max_new_tokens, of_operator.server_max_new_tokens) == (7, 7)
    single = defaults(folder, 'option.override_generation_config={"max_new_tokens": 5}')
    assert (single.max_new_tokens, single.server_max_new_tokens) == (5, 5)


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ('{"temperature": 500}', "for temperature at least 0 and at most 100"),
        ('{"top_k": 2.5}', "for top_k an integer"),
        ('{"max_new_tokens": 0}', "for max_new_tokens at least 1"),
        ('{"top_p": true}', "for top_p a finite number"),
        ("[0.6]", "a JSON object"),
        ("{", "a JSON object"),
        ('{"a": ' + "[" * 5000, "a JSON object"),
    ],
)
def test_a_value_of_the_operator_that_no_request_may_have_ends_the_start(
    folder: Path, text: str, allowed: str
) -> None:
    [line] = faults(folder, f"option.override_generation_config={text}")
    assert (
        line.startswith("option.override_generation_config='") and f": allowed is {allowed}" in line
    )


def test_a_name_that_is_no_parameter_of_a_request_is_told_and_has_no_effect(folder: Path) -> None:
    resolved = settle(folder, 'option.override_generation_config={"temprature": 0.5, "top_k": 3}')
    assert resolved.config.model.generation_defaults.values == {"top_k": 3}
    [warning] = resolved.warnings
    assert warning.startswith(
        "option.override_generation_config (serving.properties:1): 'temprature': no effect, only "
        "temperature, top_p"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -0.5),
        ("temperature", 101),
        ("temperature", True),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 3.5),
        ("top_k", 10**30),
        ("min_p", []),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
        ("max_new_tokens", "1" * 5000),
    ],
)
def test_a_bad_value_of_the_models_file_is_told_and_left_out_and_the_others_count(
    folder: Path, name: str, value: object
) -> None:
    write(folder, {"temperature": 0.6, "top_p": 0.5, name: value})
    resolved = settle(folder)

    assert resolved.config.model.generation_defaults.values == {
        key: default for key, default in {"temperature": 0.6, "top_p": 0.5}.items() if key != name
    }

    [warning] = resolved.warnings
    assert (
        f"{FILE}: {name} must be " in warning
        and ", so it does not count" in warning
        and len(warning) < 400
    )


@pytest.mark.parametrize(
    "written",
    [
        b"",
        b"{",
        b"[1]",
        b"\xff",
        b'{"temperature": NaN}',
        b"1" + b"0" * 400,
        b" " * (MAX_FILE_BYTES + 1) + b"{}",
    ],
    ids=["empty", "cut", "list", "no UTF-8", "NaN", "huge number", "too large"],
)
def test_a_file_that_cannot_be_read_is_told_and_the_model_has_no_defaults(
    folder: Path, written: bytes
) -> None:
    write(folder, written)
    resolved = settle(folder)
    assert resolved.config.model.generation_defaults == GenerationDefaults()
    [warning] = resolved.warnings
    assert f"{FILE}: " in warning and warning.endswith(", so the model has no defaults of its own")


def test_a_pipe_in_the_place_of_the_file_is_not_opened(folder: Path) -> None:
    os.mkfifo(folder / FILE)
    assert defaults(folder) == GenerationDefaults()
    assert "is no file" in faults(folder, f"option.generation_config={folder}")[0]


def test_a_default_may_have_every_value_that_a_request_may_and_no_other() -> None:
    values = [
        -3,
        -2,
        -1,
        0,
        0.005,
        0.01,
        0.5,
        1,
        1.5,
        2,
        2.5,
        100,
        100.5,
        True,
        "1",
        [],
        {},
        float("nan"),
    ]

    for name, fault in FAULTS.items():
        for value in values:
            try:
                ROWS[name].read(name, value)
            except InvalidParameter:
                assert fault(value), (name, value)
            else:
                assert not fault(value), (name, value)


def test_secure_mode_takes_the_words_and_refuses_a_folder_elsewhere(folder: Path) -> None:
    # A word is no path, although there is a folder of its name
    elsewhere = folder.parent / "lmi"
    elsewhere.mkdir()
    write(elsewhere, QWEN)

    assert (
        secured(
            folder, PICKLES, "option.generation_config=lmi"
        ).config.model.generation_defaults.values
        == {}
    )

    [line] = refusal(folder, PICKLES, f"option.generation_config={elsewhere}")
    assert "is outside of the model's folder" in line
