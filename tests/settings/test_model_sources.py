"""Models that are elsewhere: which options name them, what is fetched, and what is served once it
is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from lmi.errors import BadConfiguration, ModelUnusable
from lmi.settings.resolve import Resolved, resolve_folder

ECHO = {"OPTION_ROLLING_BATCH": "echo"}


def whole_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("")
    return folder


def wanted(resolved: Resolved) -> list[str]:
    return (
        [] if resolved.request is None else [source.source for source in resolved.request.sources]
    )


def resolve(
    asked: str | None,
    cwd: Path,
    environ: Mapping[str, str] = {},
    fetched: dict[str, Path] | None = None,
) -> Resolved:
    return resolve_folder(asked, {**ECHO, **environ}, {}, cwd, fetched)


@pytest.mark.parametrize(
    "asked", ["owner/small-model", "s3://bucket/models/small-model/", "s3://b/small-model.tar.gz"]
)
def test_a_remote_folder_is_fetched_and_then_served_by_its_name(tmp_path: Path, asked: str) -> None:
    before = resolve(asked, tmp_path)
    assert wanted(before) == [asked] and before.config.model.name == "small-model"
    cache = whole_model(tmp_path / "cache" / "0123")
    after = resolve(asked, tmp_path, fetched={asked: cache})
    assert wanted(after) == []
    assert (after.config.model.name, after.config.model.path) == ("small-model", str(cache))


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("owner/fox:Q4_K_M", "fox_Q4_K_M"),
        ("owner/fox:fox-small.Q8_0.gguf", "fox-small.Q8_0"),
        ("owner/fox/sub/fox-small.Q8_0.gguf", "fox-small.Q8_0"),
        ("s3://bucket/models/fox-small.gguf", "fox-small"),
    ],
)
def test_a_gguf_file_that_is_elsewhere_is_fetched_however_it_is_named(
    tmp_path: Path, asked: str, name: str
) -> None:
    before = resolve_folder(asked, {}, {}, tmp_path)
    assert wanted(before) == [asked] and before.config.model.name == name
    assert before.request is not None and before.request.sources[0].reads_gguf
    for variable in ("OPTION_MODEL_ID", "HF_MODEL_ID"):
        assert wanted(resolve_folder(None, {variable: asked}, {}, tmp_path)) == [asked]

    with pytest.raises(ModelUnusable, match=f"^{asked}: echo does not read GGUF; option.rolling"):
        resolve(asked, tmp_path)


def test_the_fetch_knows_whether_the_engine_reads_gguf(tmp_path: Path) -> None:
    request = resolve("owner/name", tmp_path).request
    assert request is not None and not request.sources[0].reads_gguf


def test_the_serving_properties_of_the_current_folder_do_not_count_for_a_remote_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "serving.properties").write_text("port=9999\noption.model_id=other/model\n")
    resolved = resolve("owner/name", tmp_path)
    assert wanted(resolved) == ["owner/name"] and resolved.config.server.port == 8080


def test_options_and_variables_name_remote_models_too(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.model_id=s3://bucket/m\n")
    assert wanted(resolve(str(tmp_path), tmp_path)) == ["s3://bucket/m"]
    (tmp_path / "serving.properties").write_text("")
    assert wanted(resolve(str(tmp_path), tmp_path, {"HF_MODEL_ID": "model-without-owner"})) == [
        "model-without-owner"
    ]
    assert wanted(
        resolve(None, tmp_path / "cache", {"SERVING_LOAD_MODELS": "m::Python=s3://bucket/m"})
    ) == ["s3://bucket/m"]


def test_only_the_source_that_counts_is_fetched(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.model_id=owner/first\n")
    assert wanted(resolve(str(tmp_path), tmp_path, {"HF_MODEL_ID": "owner/second"})) == [
        "owner/first"
    ]


def test_a_draft_model_is_fetched_beside_a_local_model(tmp_path: Path) -> None:
    folder = whole_model(tmp_path / "model")
    draft = whole_model(tmp_path / "cache")
    (folder / "serving.properties").write_text("option.speculative_draft_model=owner/draft\n")
    assert wanted(resolve(str(folder), tmp_path)) == ["owner/draft"]
    after = resolve(str(folder), tmp_path, fetched={"owner/draft": draft})
    assert wanted(after) == [] and after.config.engine.options["speculative_draft_model"] == str(
        draft
    )
    assert after.config.model.path == str(folder)


def test_an_existing_folder_beats_an_id_of_the_same_spelling(tmp_path: Path) -> None:
    whole_model(tmp_path / "owner" / "name")
    resolved = resolve("owner/name", tmp_path)
    assert wanted(resolved) == [] and resolved.config.model.path == str(tmp_path / "owner" / "name")


def test_an_id_of_the_environment_does_not_count_beside_a_whole_model(tmp_path: Path) -> None:
    folder = whole_model(tmp_path / "model")
    resolved = resolve(str(folder), tmp_path, {"HF_MODEL_ID": "owner/name"})
    assert wanted(resolved) == [] and resolved.config.model.path == str(folder)
    (warning,) = resolved.warnings
    assert "owner/name" in warning and str(folder) in warning and "remove HF_MODEL_ID" in warning


def test_an_id_of_the_environment_counts_beside_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("")
    (tmp_path / "config.json").write_text("{}")
    assert wanted(resolve(str(tmp_path), tmp_path, {"HF_MODEL_ID": "owner/name"})) == ["owner/name"]


def test_an_id_of_the_file_counts_beside_a_whole_model(tmp_path: Path) -> None:
    folder = whole_model(tmp_path / "model")
    (folder / "serving.properties").write_text("option.model_id=owner/name\n")
    assert wanted(resolve(str(folder), tmp_path)) == ["owner/name"]


def test_two_models_on_the_command_line_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        BadConfiguration, match="owner/name is to be served and option.model_id is owner/other"
    ):
        resolve_folder("owner/name", ECHO, {"option.model_id": "owner/other"}, tmp_path)


def test_what_the_fetch_process_is_asked_holds_what_it_must_know(tmp_path: Path) -> None:
    environ = {
        "HF_REVISION": "abc",
        "OPTION_ALLOW_PICKLE": "true",
        "SERVING_DOWNLOAD_DIR": str(tmp_path / "models"),
    }
    request = resolve("owner/name", tmp_path, environ).request
    assert request is not None

    (source,) = request.sources
    assert (source.revision, source.allow_pickle, source.download_dir) == (
        "abc",
        True,
        str(tmp_path / "models"),
    )
