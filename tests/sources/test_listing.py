"""Which GGUF model is taken of a listing, by the name that a person gives."""

from __future__ import annotations

import pytest

from lmi.errors import ModelUnusable, SecurityRefused
from lmi.sources.fetches import WantedSource
from lmi.sources.listing import taken
from lmi.sources.source import HubModel, S3Model

FOX = [
    "README.md",
    "fox-IQ4_XS.gguf",
    "fox-Q4_K_M.gguf",
    "fox-Q4_K_M_L.gguf",
    "fox-UD-Q5_K_XL.gguf",
    "fox.Q8_0.gguf",
    "mmproj-fox-F16.gguf",
    "fox.imatrix.gguf",
    "BF16/fox-BF16-00001-of-00002.gguf",
    "BF16/fox-BF16-00002-of-00002.gguf",
]
WEIGHTLESS = [path for path in FOX if not path.endswith(".gguf")]


def taken_of(source: HubModel | S3Model, paths: list[str] = FOX, **options: bool) -> list[str]:
    return taken(source, paths, WantedSource(source=str(source), download_dir="/d", **options))


@pytest.mark.parametrize(
    ("word", "paths"),
    [
        ("", ["fox-Q4_K_M.gguf"]),
        ("Q4_K_M", ["fox-Q4_K_M.gguf"]),
        ("q4_k_m", ["fox-Q4_K_M.gguf"]),
        ("Q5_K_XL", ["fox-UD-Q5_K_XL.gguf"]),
        ("UD-Q5_K_XL", ["fox-UD-Q5_K_XL.gguf"]),
        ("Q8_0", ["fox.Q8_0.gguf"]),
        ("fox.Q8_0.gguf", ["fox.Q8_0.gguf"]),
        ("BF16", FOX[-2:]),
        ("BF16/fox-BF16-00002-of-00002.gguf", FOX[-2:]),
    ],
)
def test_a_word_or_a_path_names_a_model_of_a_repository(word: str, paths: list[str]) -> None:
    assert taken_of(HubModel("writers/fox", word)) == paths


@pytest.mark.parametrize(
    "word", ["Q4_K", "Q4_0", "XL_", "F16", "Q5", "Q8.0", "fox-Q8_0.gguf", ".*"]
)
def test_a_name_that_fits_nothing_is_answered_with_the_names_that_are_there(word: str) -> None:
    source = HubModel("writers/fox", word)
    with pytest.raises(ModelUnusable) as raised:
        taken_of(source)

    assert str(raised.value) == (
        f"{source}: there is no such GGUF file, only BF16/fox-BF16-00001-of-00002.gguf, "
        "fox-IQ4_XS.gguf, fox-Q4_K_M.gguf, fox-Q4_K_M_L.gguf, fox-UD-Q5_K_XL.gguf, fox.Q8_0.gguf"
    )


def test_without_the_usual_quantisation_it_is_the_first() -> None:
    assert taken_of(HubModel("writers/fox"), ["b.gguf", "a.Q2_K.gguf", "mmproj.gguf"]) == [
        "a.Q2_K.gguf"
    ]


def test_a_repository_without_gguf_says_what_it_has() -> None:
    with pytest.raises(ModelUnusable, match="no GGUF file; the repository holds README.md$"):
        taken_of(HubModel("writers/fox", "Q4_K_M"), WEIGHTLESS)


def test_weights_in_safetensors_or_pickles_count_unless_gguf_is_named() -> None:
    whole = [*FOX, "config.json", "model.safetensors"]
    assert taken_of(HubModel("writers/fox"), whole) == ["config.json", "model.safetensors"]
    assert taken_of(HubModel("writers/fox", "Q8_0"), whole) == ["fox.Q8_0.gguf"]

    with pytest.raises(SecurityRefused, match="is pickled"):
        taken_of(HubModel("writers/fox"), [*FOX, "config.json", "pytorch_model.bin"])


def test_of_a_prefix_with_several_models_one_must_be_named() -> None:
    source = S3Model("bucket", "fox/")
    assert taken_of(source, ["config.json", *FOX[-2:]]) == FOX[-2:]
    with pytest.raises(ModelUnusable, match="it holds several models, name one of the files: BF16"):
        taken_of(source)


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        (["a-00002-of-00002.gguf"], "it has no a-00001-of-00002.gguf, a part of a-00001-of"),
        (["a-00001-of-00003.gguf", "a-00003-of-00003.gguf"], "it has no a-00002-of-00003.gguf"),
        (["a-00001-of-90000.gguf"], "the name of a split file counts from 00001 to at most 1024"),
    ],
)
def test_a_split_model_that_is_not_whole_is_refused(paths: list[str], says: str) -> None:
    with pytest.raises(ModelUnusable, match=says):
        taken_of(HubModel("writers/fox"), paths)


@pytest.mark.parametrize("path", ["../a.gguf", "a/../../b.gguf", "/etc/a.gguf", "a\x1b.gguf"])
def test_a_path_that_leaves_the_repository_is_refused(path: str) -> None:
    with pytest.raises(SecurityRefused):
        taken_of(HubModel("writers/fox"), [path])


def test_a_long_listing_of_split_files_costs_no_more_than_its_names() -> None:
    paths = [f"{number}-00001-of-01024.gguf" for number in range(20_000)]
    with pytest.raises(ModelUnusable, match="it has no 0-00002-of-01024.gguf"):
        taken_of(HubModel("writers/fox"), paths)


def test_an_engine_that_reads_no_gguf_is_told_before_anything_is_fetched() -> None:
    with pytest.raises(ModelUnusable, match="its weights are GGUF, .* may be lmi-dist$"):
        taken_of(HubModel("writers/fox"), reads_gguf=False)


def test_an_adapter_is_never_gguf() -> None:
    with pytest.raises(ModelUnusable, match="an adapter has adapter_config.json"):
        taken_of(HubModel("writers/fox"), is_adapter=True)
