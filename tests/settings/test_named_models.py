"""Every variable that names a model, of any image: it is followed, or the start ends. None is
served by the demo.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest

from lmi.errors import BadConfiguration, ModelUnusable
from lmi.settings import model_names
from lmi.settings.resolve import Resolved, resolve_folder
from lmi.settings.served_folder import demo_folder
from lmi.settings.table import MODEL
from tests.settings.settling import settle, source_of

FOLLOWED = (
    "SM_VLLM_MODEL",
    "SM_SGLANG_MODEL_PATH",
    "SM_SGLANG_MODEL",
    "HF_MODEL_ID",
    "MODEL_ID",
    "OPTION_MODEL_ID",
)
OF_LLAMA_CPP = (
    *("SM_LLAMA_CPP_MODEL_URL", "SM_LLAMA_CPP_MODELS_DIR", "SM_LLAMA_CPP_HF_FILE"),
    *("SM_LLAMA_CPP_DOCKER_REPO", "SM_LLAMA_CPP_GPT_OSS_20B_DEFAULT"),
)
UNREAD = (
    *("SM_VLLM_CONFIG", "SM_SGLANG_CONFIG", "HF_MODEL_DIR", "NIM_MODEL_NAME"),
    *(
        "LLAMA_ARG_MODEL",
        "LLAMA_ARG_HF_REPO",
        "OPTION_MODEL_PATH",
        "OPTION_MODEL_DIR",
        "SERVING_MODEL_URL",
    ),
)


def resolved_in(folder: Path, environ: Mapping[str, str], asked: str | None = None) -> Resolved:
    return resolve_folder(asked, environ, {}, folder)


def refusal(folder: Path, environ: Mapping[str, str]) -> str:
    with pytest.raises(BadConfiguration) as caught:
        resolved_in(folder, environ)

    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A folder without a model, as a container without /opt/ml/model starts in."""
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


@pytest.fixture
def whole(folder: Path) -> Path:
    """A folder with a whole model."""
    (folder / "model.safetensors").touch()
    return folder


def test_the_demo_is_served_where_nothing_names_a_model(empty: Path) -> None:
    environ = {
        "SM_VLLM_MAX_MODEL_LEN": "4096",
        "SM_LLAMA_CPP_CTX_SIZE": "4096",
        "LLAMA_ARG_CTX_SIZE": "4096",
    }
    assert resolved_in(empty, environ).config.model.path == str(demo_folder())


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_variable_that_names_a_model_of_the_hub_is_followed(empty: Path, name: str) -> None:
    resolved = resolved_in(empty, {name: "owner/tiny"})
    assert resolved.request is not None
    assert [wanted.source for wanted in resolved.request.sources] == ["owner/tiny"]
    assert (source_of(resolved, MODEL), resolved.warnings) == (name, ())


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_variable_that_names_a_folder_is_followed(empty: Path, folder: Path, name: str) -> None:
    assert resolved_in(empty, {name: str(folder)}).config.model.path == str(folder)


@pytest.mark.parametrize("name", ["SM_VLLM_MODEL", "SM_SGLANG_MODEL_PATH"])
def test_a_variable_of_another_image_beats_the_model_folder_and_the_hubs_id(
    whole: Path, name: str
) -> None:
    environ = {name: "owner/other", "HF_MODEL_ID": "owner/third"}
    resolved = settle(whole, environ=environ)

    assert resolved.request is not None
    assert [wanted.source for wanted in resolved.request.sources] == ["owner/other"]
    assert (
        f"option.model_id: owner/other ({name}) counts, not owner/third (HF_MODEL_ID)"
        in resolved.notes
    )

    by_folder = settle(whole, environ={"HF_MODEL_ID": "owner/third"})
    assert by_folder.config.model.path == str(whole)


def test_the_revision_of_that_model_is_followed_too(empty: Path) -> None:
    environ = {"SM_VLLM_MODEL": "owner/tiny", "SM_VLLM_REVISION": "v2"}
    assert resolved_in(empty, environ).config.model.revision == "v2"


def test_the_folder_of_the_command_line_beats_every_variable(whole: Path) -> None:
    environ = {"SM_VLLM_MODEL": "owner/other", "SM_LLAMA_CPP_MODEL": "/opt/ml/model/other.gguf"}
    resolved = resolved_in(whole.parent, environ, asked=str(whole))

    assert (resolved.config.model.path, resolved.request) == (str(whole), None)
    assert resolved.warnings == (
        (
            f"option.model_id=owner/other (SM_VLLM_MODEL): has no effect beside {whole}, which the "
            f"command line names"
        ),
        f"option.model_id=/opt/ml/model/other.gguf (SM_LLAMA_CPP_MODEL): has no effect beside "
        f"{whole}, which the command line names",
    )

    demo = resolved_in(whole.parent, environ, asked="demo")
    assert demo.config.model.path == str(demo_folder())


def test_a_variable_is_followed_beside_a_folder_of_the_command_line_that_has_only_options(
    empty: Path,
) -> None:
    (empty / "serving.properties").write_text("option.max_model_len=64")
    resolved = resolved_in(empty.parent, {"SM_VLLM_MODEL": "owner/tiny"}, asked=str(empty))
    assert source_of(resolved, MODEL) == "SM_VLLM_MODEL"


@pytest.mark.parametrize("name", OF_LLAMA_CPP)
@pytest.mark.parametrize("has_folder", [False, True])
def test_a_name_of_a_model_that_only_llama_server_reads_ends_the_start(
    empty: Path, folder: Path, name: str, has_folder: bool
) -> None:
    said = refusal(
        folder if has_folder else empty, {name: "owner/tiny-GGUF", "HF_MODEL_ID": str(folder)}
    )
    assert said == (
        f"{name}='owner/tiny-GGUF': names a model and is not read; write HF_MODEL_ID with "
        "OWNER/NAME:Q4_K_M, OWNER/NAME/FILE.gguf or the path of a file in its place"
    )


@pytest.mark.parametrize(
    ("environ", "source"),
    [
        ({"SM_LLAMA_CPP_HF_REPO": "owner/fox-GGUF"}, "owner/fox-GGUF"),
        ({"SM_LLAMA_CPP_HF_REPO": "owner/fox-GGUF:Q8_0"}, "owner/fox-GGUF:Q8_0"),
        (
            {
                "SM_LLAMA_CPP_HF_REPO": "owner/fox-GGUF:Q8_0",
                "SM_LLAMA_CPP_HF_FILE": "sub/fox.gguf",
            },
            "owner/fox-GGUF/sub/fox.gguf",
        ),
    ],
)
def test_llama_cpps_variables_name_a_file_of_a_hub(
    empty: Path, environ: dict[str, str], source: str
) -> None:
    resolved = resolved_in(empty, environ | {"HF_MODEL_ID": "owner/other"})
    assert resolved.request is not None
    assert [wanted.source for wanted in resolved.request.sources] == [source]
    assert (source_of(resolved, MODEL), resolved.warnings) == ("SM_LLAMA_CPP_HF_REPO", ())


def test_llama_cpps_variables_name_a_file_before_a_folder_before_a_repository(
    empty: Path, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    for path in ("b/b.gguf", "a/c/deep.gguf", "b/a.gguf"):
        (models / path).parent.mkdir(parents=True, exist_ok=True)
        (models / path).touch()

    def served(**names: str) -> list[str]:
        environ = {f"SM_LLAMA_CPP_{name}": text for name, text in names.items()}
        resolved = resolved_in(empty, environ)
        assert resolved.request is not None
        return [wanted.source for wanted in resolved.request.sources]

    folder, file = str(models), str(models / "b" / "b.gguf")
    repository = "owner/fox-GGUF"
    assert served(MODEL=file, MODEL_DIR=folder, HF_REPO=repository) == [file]
    assert served(MODEL_DIR=folder, HF_REPO=repository) == [str(models / "b" / "a.gguf")]

    (models / "top.gguf").touch()
    assert served(MODEL_DIR=folder) == [str(models / "top.gguf")]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("SM_LLAMA_CPP_MODEL", "/nowhere/x.gguf", "no such file"),
        ("SM_LLAMA_CPP_MODEL_DIR", "/nowhere", "no such folder"),
    ],
)
def test_a_file_of_llama_cpps_variables_that_is_not_there_is_named(
    empty: Path, name: str, text: str, says: str
) -> None:
    with pytest.raises(ModelUnusable, match=f"{says} in .* [(]{name}[)]$"):
        resolved_in(empty, {name: text})


def test_other_variables_of_llama_cpp_set_what_they_mean(whole: Path) -> None:
    environ = {
        "SM_LLAMA_CPP_CTX_SIZE": "4096",
        "SM_LLAMA_CPP_PARALLEL": "8",
        "SM_LLAMA_CPP_ALIAS": "fox,hare",
        "SM_LLAMA_CPP_PORT": "8090",
        "SM_LLAMA_CPP_N_GPU_LAYERS": "99",
    }
    resolved = settle(whole, environ=environ)
    engine = resolved.config.engine

    assert (engine.max_sequence_length, engine.max_num_sequences) == (4096, 8)
    assert (resolved.config.model.name, resolved.config.model.aliases) == ("fox", ("hare",))
    assert resolved.config.server.port == 8090
    assert resolved.warnings == (
        "SM_LLAMA_CPP_N_GPU_LAYERS: flags of llama-server that no option here means",
    )


def test_llama_servers_words_for_its_defaults_are_the_defaults_here(whole: Path) -> None:
    environ = {
        "SM_LLAMA_CPP_CTX_SIZE": "0",
        "SM_LLAMA_CPP_PARALLEL": "-1",
        "SM_LLAMA_CPP_THREADS": "-1",
    }
    assert settle(whole, environ=environ).config == settle(whole).config


@pytest.mark.parametrize("name", UNREAD)
def test_a_name_of_other_servers_ends_a_start_that_would_serve_the_demo(
    empty: Path, folder: Path, name: str
) -> None:
    message = refusal(empty, {name: "/models/other"})
    assert (
        "names a model and is not read; write HF_MODEL_ID with OWNER/NAME or a folder in its place"
        in message
    )
    assert resolved_in(
        empty, {name: "/models/other", "HF_MODEL_ID": str(folder)}
    ).config.model.path == str(folder)
    assert resolved_in(empty, {name: "/models/other"}, asked="demo").config.model.path == str(
        demo_folder()
    )


def test_a_server_of_several_models_serves_none_that_a_variable_names(empty: Path) -> None:
    environ = {
        "SAGEMAKER_MULTI_MODEL": "true",
        "SM_VLLM_MODEL": "owner/tiny",
        "SM_LLAMA_CPP_MODEL_URL": "/x.gguf",
    }
    resolved = resolved_in(empty, environ)
    assert [warning.split(":")[0] for warning in resolved.warnings] == [
        "SM_LLAMA_CPP_MODEL_URL='/x.gguf'",
        "option.model_id=owner/tiny (SM_VLLM_MODEL)",
    ]


def test_an_empty_variable_names_no_model(empty: Path) -> None:
    environ = dict.fromkeys((*FOLLOWED, *OF_LLAMA_CPP, *UNREAD), " ")
    assert resolved_in(empty, environ).config.model.path == str(demo_folder())


# What a request may call the model.


def test_a_model_answers_to_its_path_and_to_its_id_at_the_hub(folder: Path, tmp_path: Path) -> None:
    model = settle(folder).config.model
    assert model.answers_to(str(folder)) and model.answers_to(f"{folder}/")
    assert not model.answers_to(str(folder.parent)) and not model.answers_to("/")

    before = resolved_in(tmp_path, {"HF_MODEL_ID": "owner/tiny"})
    fetched = {"owner/tiny": folder}
    after = resolve_folder(None, {"HF_MODEL_ID": "owner/tiny"}, {}, tmp_path, fetched)
    for resolved in (before, after):
        assert (resolved.config.model.name, resolved.config.model.answers_to("owner/tiny")) == (
            "tiny",
            True,
        )


def test_the_model_in_a_folder_of_the_platforms_folder_answers_to_both(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_names, "PLATFORM_FOLDER", tmp_path)
    model = settle(folder).config.model
    assert model.answers_to(str(folder)) and model.answers_to(str(tmp_path))


def test_a_word_that_an_adapter_may_be_called_is_no_further_name(folder: Path) -> None:
    model = settle(
        folder.parent, "option.model_id=tiny\noption.served_model_name=mine"
    ).config.model
    assert model.answers_to(str(folder)) and not model.answers_to("tiny")


def test_a_served_name_may_be_a_path(folder: Path) -> None:
    model = settle(folder, "option.served_model_name=/opt/ml/model short").config.model
    assert (model.name, model.aliases) == ("/opt/ml/model", ("short",))
