"""What the serving.properties of a stranger may not do, and what the start says of the operator's
own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from lmi.errors import BadConfiguration
from lmi.models.settings import resolve_model
from lmi.settings.config import ServerConfig
from lmi.settings.option import PICKLES, REMOTE_CODE
from lmi.settings.resolve import Resolved, resolve_folder
from lmi.settings.strangers import PLAIN_OPTIONS
from lmi.settings.table import OPTIONS
from tests.settings.settling import settle

ECHO = "option.rolling_batch=echo\n"
POWERS = [
    "option.env=LD_PRELOAD=/evil.so",
    "option.trust_remote_code=true",
    "option.allow_pickle=true",
    "option.logits_post_processors=processors.py",
    "gpu.option.env=A=1\ncpu.option.env=A=1",
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "store" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def load(
    model: Path,
    text: str,
    environ: Mapping[str, str] | None = None,
    flags: dict[str, str] | None = None,
    allowed: tuple[str, ...] = (),
) -> Resolved:
    """Resolve the settings of one of several models."""
    (model / "serving.properties").write_text(text)
    server = ServerConfig(
        model_store=str(model.parent), model_flags=flags or {}, allow_model_options=allowed
    )
    return resolve_model("m", str(model), server, environ or {})


def refusal(model: Path, text: str, **given: object) -> str:
    with pytest.raises(BadConfiguration) as caught:
        load(model, text, **given)  # type: ignore[arg-type]

    return str(caught.value)


@pytest.mark.parametrize("text", POWERS)
def test_the_file_of_one_of_several_models_takes_no_power_and_the_refusal_names_it(
    model: Path, text: str
) -> None:
    message = refusal(model, ECHO + text)
    key = text.partition("=")[0].removeprefix("gpu.")
    assert message.startswith(f"{key} ({model}/serving.properties:") or message.startswith(
        f"cpu.{key} ({model}/"
    )
    assert f"allow_model_options={key}" in message and "one of several models" in message
    assert "/evil.so" not in message


def test_what_secure_mode_knows_to_run_code_in_an_engine_is_a_power() -> None:
    dangerous = [
        option
        for option in OPTIONS
        if option.refused_by in (PICKLES, REMOTE_CODE) or not option.is_safe
    ]
    assert [
        option.key for option in dangerous if not option.grants and option.part != "server"
    ] == []


@pytest.mark.parametrize(
    "text", ["option.trust_remote_code=false", "option.allow_pickle=false", "option.dtype=fp32"]
)
def test_what_gives_nothing_is_no_power(model: Path, text: str) -> None:
    assert load(model, ECHO + text).config.engine.trust_remote_code is False


def test_what_the_operator_says_counts_for_every_model(model: Path) -> None:
    environ = {"OPTION_ENV": "A=1", "OPTION_TRUST_REMOTE_CODE": "true"}
    engine = load(model, ECHO, environ, {"option.allow_pickle": "true"}).config.engine
    assert (engine.environ, engine.trust_remote_code, engine.allow_pickle) == (
        {"A": "1"},
        True,
        True,
    )


def test_a_file_may_repeat_what_the_operator_says_and_not_change_it(model: Path) -> None:
    environ = {"OPTION_ENV": "A=1"}
    assert load(model, f"{ECHO}option.env=A=1", environ).config.engine.environ == {"A": "1"}
    assert "option.env" in refusal(model, f"{ECHO}option.env=A=2", environ=environ)


def test_a_file_that_says_it_twice_agrees_with_itself_alone(model: Path) -> None:
    assert "option.env" in refusal(
        model, f"{ECHO}option.env=A=1\ncpu.option.env=A=1\ngpu.option.env=A=1"
    )


@pytest.mark.parametrize("name", ["option.env", "env", "*"])
def test_the_operator_may_let_the_files_of_models_say_it(model: Path, name: str) -> None:
    assert load(model, f"{ECHO}option.env=A=1", allowed=(name,)).config.engine.environ == {"A": "1"}


def test_a_file_cannot_allow_itself_anything(model: Path) -> None:
    assert "option.env" in refusal(model, f"{ECHO}option.env=A=1\nallow_model_options=*")


@pytest.mark.usefixtures("vllm")
def test_of_an_engines_own_arguments_a_file_gives_numbers_switches_and_words(model: Path) -> None:
    vllm = "option.rolling_batch=vllm\n"
    plain = "option.max_loras=2\noption.load_format=safetensors\noption.kv_cache_dtype=fp8\noption.paged_attention=1\n"  # noqa: E501
    assert load(model, vllm + plain).config.engine.options["max_loras"] == "2"

    for text in (
        "hf_overrides={}",
        "kv_transfer_config={}",
        "speculative_config={}",
        "load_format=pt",
    ):
        key = f"option.{text.partition('=')[0]}"
        message = refusal(model, f"{vllm}option.{text}")
        assert (
            message.startswith(f"{key} (")
            and "an argument of vllm, which may name code or files" in message
        )

    assert load(
        model, f"{vllm}option.hf_overrides={{}}", allowed=("hf_overrides",)
    ).config.engine.options


def test_of_some_arguments_only_the_words_that_name_no_code_are_plain(model: Path) -> None:
    assert load(model, f"{ECHO}option.tokenizer_mode=slow").config.engine.options == {
        "tokenizer_mode": "slow"
    }
    assert refusal(model, f"{ECHO}option.tokenizer_mode=custom").startswith(
        "option.tokenizer_mode ("
    )


def test_engines_that_listen_to_a_leader_are_the_operators_affair() -> None:
    assert PLAIN_OPTIONS.isdisjoint(
        {"option.nnodes", "option.node_rank", "option.master_addr", "option.master_port"}
    )


def test_an_option_that_the_engine_does_not_read_is_reported_and_not_refused(model: Path) -> None:
    resolved = load(
        model, "option.rolling_batch=lmi-dist\noption.hf_overrides={}\noption.tokenizer=/etc/passwd"
    )
    assert any("hf_overrides" in warning for warning in resolved.warnings)


@pytest.mark.parametrize("path", ["/etc/hostname", "../other/template.jinja"])
def test_a_file_names_no_path_outside_of_its_folder(model: Path, path: str) -> None:
    foreign_file = model.parent / "other" / "template.jinja"
    foreign_file.parent.mkdir()
    foreign_file.write_text("{{ messages }}")
    message = refusal(model, f"{ECHO}option.chat_template={path}")

    assert (
        message.startswith(f"option.chat_template ({model}/serving.properties:2)")
        and "outside" in message
    )

    (model / "own.jinja").write_text("{{ messages[0].content }}")
    assert (
        load(model, f"{ECHO}option.chat_template=own.jinja").config.model.chat_template
        == "own.jinja"
    )


def test_the_folder_of_the_only_model_says_what_it_switches_on(folder: Path) -> None:
    (folder / "model.py").write_text(
        "from djl_python import output_formatter\n@output_formatter\ndef f(o): ...\n"
    )
    text = f"{ECHO}option.env=A=1\noption.allow_pickle=true\nlog_level=DEBUG\n"
    notes = [note for note in settle(folder, text).notes if "model's own" in note]

    assert notes == [
        "option.env=*** (serving.properties:2): the model's own file switches on variables of "
        "processes, of which "
        "LD_PRELOAD and others run code",
        "option.allow_pickle=true (serving.properties:3): the model's own file switches on pickled "
        "weights, which can "
        "run code in the engine",
        f"{folder}/model.py: the model's own code runs, in a process of its own",
    ]


def of_hub_cache(folder: Path) -> Path:
    return folder / "hub" / "models--owner--name" / "snapshots" / ("0" * 40)


def of_hub_client(folder: Path) -> Path:
    model = folder / "downloaded"
    notes = model / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    (notes / "serving.properties.metadata").write_text("")
    return model


def of_bucket(folder: Path) -> Path:
    (folder / ("a" * 64) / "blobs").mkdir(parents=True)
    return folder / ("a" * 64) / "model"


@pytest.mark.parametrize(
    ("place", "origin"),
    [(of_hub_cache, "a hub"), (of_hub_client, "a hub"), (of_bucket, "a bucket")],
)
def test_the_file_of_a_folder_that_was_fetched_sets_nothing_of_a_process(
    tmp_path: Path, place: object, origin: str
) -> None:
    folder: Path = place(tmp_path)  # type: ignore[operator]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "serving.properties").write_text(
        f"{ECHO}option.trust_remote_code=true\nport=9\noption.dtype=fp32\n"
    )
    with pytest.raises(BadConfiguration) as caught:
        resolve_folder(str(folder), {}, {})

    assert caught.value.exit_code == 2

    lines = str(caught.value).splitlines()
    places = [
        f"option.trust_remote_code ({folder}/serving.properties:2)",
        f"port ({folder}/serving.properties:3)",
    ]

    assert [line.partition(":")[0] for line in lines] == [
        place.partition(":")[0] for place in places
    ]
    assert all(line.startswith(place) for line, place in zip(lines, places, strict=True))
    assert all(line.endswith(f"(the file is of {origin})") for line in lines)

    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(BadConfiguration):
        resolve_folder(str(tmp_path / "link"), {}, {})

    flags = {"allow_model_options": "option.trust_remote_code,port"}
    assert resolve_folder(str(folder), {}, flags).config.server.port == 9


@pytest.mark.parametrize(
    ("model_id", "grants"),
    [
        ("/secret", "{tmp}/secret, which is outside of the model's folder"),
        ("../../../../secret", "{tmp}/secret, which is outside of the model's folder"),
        ("/secret/private.gguf", "{tmp}/secret/private.gguf, which is outside of the model's"),
        ("owner/other", "another model, which is fetched"),
        ("owner/other:Q4_K_M", "another model, which is fetched"),
        ("s3://bucket/other", "another model, which is fetched"),
        ("smollm2", "another model, which is fetched"),
    ],
)
def test_the_file_of_a_folder_that_was_fetched_names_no_other_model_in_its_place(
    tmp_path: Path, model_id: str, grants: str
) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    for name in ("config.json", "model.safetensors", "private.gguf"):
        (secret / name).write_text("{}")

    folder = of_hub_cache(tmp_path)
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "config.json").write_text("{}")
    path = f"{tmp_path}{model_id}" if model_id.startswith("/") else model_id
    file = folder / "serving.properties"
    file.write_text(f"option.model_id={path}\n")
    with pytest.raises(BadConfiguration) as caught:
        resolve_folder(str(folder), {}, {}, tmp_path)

    message = str(caught.value)
    assert message.startswith(f"option.model_id ({file}:1): {grants.format(tmp=tmp_path)}")
    assert message.endswith("(the file is of a hub)")

    flags = {"allow_model_options": "option.model_id"}
    assert resolve_folder(str(folder), {}, flags, tmp_path).config.model

    file.write_text(f"{ECHO}option.model_id=sub\n")
    model = resolve_folder(str(folder), {}, {}, tmp_path).config.model
    assert model.path == str(folder / "sub"), "a folder within its own is its own"


def test_a_file_that_its_owner_wrote_beside_a_download_is_his_own(tmp_path: Path) -> None:
    folder = of_hub_client(tmp_path)
    (folder / ".cache" / "huggingface" / "download" / "serving.properties.metadata").unlink()
    (folder / "config.json").write_text("{}")
    (folder / "serving.properties").write_text(f"{ECHO}port=9\n")
    assert resolve_folder(str(folder), {}, {}).config.server.port == 9


def test_code_that_another_client_put_beside_a_fetched_model_runs_only_if_the_model_is_trusted(
    tmp_path: Path,
) -> None:
    model = tmp_path / "cache" / "0123"
    model.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (model / name).write_text("{}")

    (model / "model.py").write_text("def handle(inputs): ...\n")
    environ = {"OPTION_ROLLING_BATCH": "echo"}
    resolved = resolve_folder("owner/name", environ, {}, tmp_path, {"owner/name": model})

    assert resolved.config.user_code is None
    assert any(note.startswith(f"{model}/model.py: not run") for note in resolved.notes)

    for source, more in (
        ("owner/name", {"OPTION_TRUST_REMOTE_CODE": "true"}),
        ("s3://b/m.tar.gz", {}),
    ):
        assert resolve_folder(
            source, environ | more, {}, tmp_path, {source: model}
        ).config.is_user_code
