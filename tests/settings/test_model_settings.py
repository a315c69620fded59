"""The settings of one of several models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from lmi.errors import BadConfiguration, ModelUnusable, OutOfMemory, SecurityRefused
from lmi.models.settings import resolve_model
from lmi.settings.config import ServerConfig
from lmi.settings.ports import choose_free_ports
from lmi.settings.resolve import Resolved, resolve_folder
from lmi.settings.secure_mode import CONTROLS

RANGE = "SAGEMAKER_SAFE_PORT_RANGE"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    model = tmp_path / "models" / "h" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    return tmp_path / "models"


def settle(
    store: Path,
    text: str = "",
    environ: Mapping[str, str] | None = None,
    flags: dict[str, str] | None = None,
    secured: bool = False,
) -> Resolved:
    model = store / "h" / "model"
    (model / "serving.properties").write_text("option.rolling_batch=echo\n" + text)
    server = ServerConfig(
        model_store=str(store),
        frontend_workers=7,
        log_level="DEBUG",
        model_flags=flags or {},
        secure_mode=secured,
        security_controls=tuple(CONTROLS),
        download_dir="/downloads",
    )
    return resolve_model("chat", str(model), server, environ or {})


def test_the_model_has_the_name_that_it_was_loaded_under_and_the_server_its_own_settings(
    store: Path,
) -> None:
    text = "option.model_name=other\noption.model_alias=more\nport=9\nlog_level=ERROR\nbatch_transform=true"  # noqa: E501
    resolved = settle(store, text)

    assert (resolved.config.model.name, resolved.config.model.aliases) == ("chat", ())
    assert (resolved.config.server.frontend_workers, resolved.config.server.log_level) == (
        7,
        "DEBUG",
    )

    [note] = [note for note in resolved.notes if "one of several models" in note]
    assert (
        "option.model_name, option.model_alias, port, log_level, batch_transform: no effect" in note
    )


def test_each_of_several_models_has_the_defaults_of_its_own_maker_and_the_flags_of_the_server(
    store: Path,
) -> None:
    (store / "h" / "model" / "generation_config.json").write_text('{"temperature": 0.6}')
    assert settle(store).config.model.generation_defaults.values == {"temperature": 0.6}

    flags = {"option.generation_config": "lmi", "option.override_generation_config": '{"top_k": 5}'}
    assert settle(store, flags=flags).config.model.generation_defaults.values == {"top_k": 5}


def test_its_file_counts_and_the_environment_and_the_command_line_too(store: Path) -> None:
    environ = {"OPTION_MAX_MODEL_LEN": "512", "OPTION_DTYPE": "bf16", "RETRY_WINDOW": "1"}
    config = settle(
        store, "option.dtype=fp32\nrequired_memory_mb=77", environ, {"retry_threshold": "5"}
    ).config
    engine = config.engine
    assert (engine.dtype, engine.max_sequence_length, engine.retry_threshold) == ("fp32", 512, 5)
    assert config.model.required_memory_mb == 77


@pytest.mark.parametrize(
    "name", ["HF_MODEL_ID", "OPTION_MODEL_ID", "SERVING_LOAD_MODELS", "OPTION_SERVED_MODEL_NAME"]
)
def test_a_model_that_the_environment_names_is_not_meant(store: Path, name: str) -> None:
    config = settle(
        store, "", {name: "/etc", "SAGEMAKER_BIND_TO_PORT": "1", "SAGEMAKER_MULTI_MODEL": "true"}
    ).config
    assert (config.model.path, config.model.name) == (str(store / "h" / "model"), "chat")


def test_the_url_of_a_folder_names_it_too(store: Path) -> None:
    url = f"file://{store}/h/%6Dodel"
    config = resolve_model("chat", url, ServerConfig(model_store=str(store)), {}).config
    assert config.model.path == str(store / "h" / "model")


@pytest.mark.parametrize(
    "url",
    [
        "relative",
        "",
        "/etc",
        "/",
        "{store}",
        "{store}/h/../..",
        "{store}/link",
        "/proc/self/root{store}/h/model",
        "\0",
        "file:///etc",
        "file:h",
        "file://",
    ],
)
def test_a_folder_outside_of_the_store_is_refused(store: Path, url: str) -> None:
    (store / "link").symlink_to("/etc")
    with pytest.raises(ModelUnusable, match="model_store"):
        resolve_model("chat", url.format(store=store), ServerConfig(model_store=str(store)), {})


def test_its_file_leads_nowhere_else(store: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelUnusable, match="model_store"):
        settle(store, f"option.model_id={tmp_path}")


def test_its_handlers_of_aws_s_standards_are_not_run_and_end_its_load(store: Path) -> None:
    file = store / "h" / "model" / "model.py"
    file.write_text("def custom_sagemaker_ping_handler(): ...")
    with pytest.raises(ModelUnusable, match="are not run for one of several models"):
        settle(store)

    file.unlink()
    variable = {"CUSTOM_FASTAPI_PING_HANDLER": "model:check", "STANDARD_PIP_ARGS": "one"}
    config = settle(store, environ=variable).config
    assert (config.user_code, config.requirements) == (None, None), "the start has told of them"


def test_nothing_is_downloaded_for_it(store: Path) -> None:
    for text in ("option.model_id=s3://bucket/model", "option.speculative_draft_model=owner/draft"):
        with pytest.raises(
            ModelUnusable, match=f"names {text.partition('=')[2]}: nothing is downloaded"
        ):
            settle(store, text)


REFUSED = [
    ("", "model.py", "model.py: refused by DISALLOW_CUSTOM_INFERENCE_SCRIPTS"),
    ("", "requirements.txt", "requirements.txt: refused by DISALLOW_REQUIREMENTS_TXT"),
    ("", "deep/weights.PKL", "weights.PKL: refused by DISALLOW_PICKLE_FILES"),
    ("", "chat_template.jinja", "chat_template.jinja: refused by DISALLOW_CHAT_TEMPLATE"),
    ("option.trust_remote_code=true", "", "refused by DISALLOW_TRUST_REMOTE_CODE"),
    (
        "secure_mode=false\nsecurity_controls=\noption.env=LD_PRELOAD=x.so",
        "",
        "secure mode does not allow this option",
    ),
    ("option.chat_template=/etc/hostname", "", "is outside of the model's folder"),
]


@pytest.mark.parametrize(("text", "file", "why"), REFUSED)
def test_in_secure_mode_it_is_refused_what_a_model_at_the_start_is_refused(
    store: Path, text: str, file: str, why: str
) -> None:
    if file:
        (store / "h" / "model" / file).parent.mkdir(exist_ok=True)
        (store / "h" / "model" / file).write_text("")

    with pytest.raises(SecurityRefused, match=why):
        settle(store, text, secured=True)


def test_a_harmless_model_is_loaded_under_all_controls(store: Path) -> None:
    assert settle(store, secured=True).warnings == ()


def test_what_its_requirements_name_is_in_the_servers_download_dir(
    store: Path, tmp_path: Path
) -> None:
    (store / "h" / "model" / "model.py").write_text("def handle(inputs): ...")
    (store / "h" / "model" / "requirements.txt").write_text("tomli")
    server = ServerConfig(model_store=str(store), download_dir=str(tmp_path / "downloads"))
    alone = resolve_folder(
        str(store / "h" / "model"), {"SERVING_DOWNLOAD_DIR": server.download_dir}, {}
    ).config

    assert alone.requirements is not None
    assert (
        resolve_model("chat", str(store / "h" / "model"), server, {}).config.requirements
        == alone.requirements
    )


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({}, "SAGEMAKER_SECURITY_CONTROLS is missing"),
        ({"SAGEMAKER_SECURITY_CONTROLS": "DISALLOW_MAGIC"}, "unknown control DISALLOW_MAGIC"),
        (
            {
                "SAGEMAKER_SECURITY_CONTROLS": "DISALLOW_PICKLE_FILES",
                "SAGEMAKER_UNTRUSTED_CHANNELS": "/nowhere",
            },
            "/nowhere is not a folder",
        ),
    ],
)
def test_a_server_with_several_models_starts_with_known_controls_only(
    tmp_path: Path, environ: dict[str, str], why: str
) -> None:
    variables = {"SAGEMAKER_MULTI_MODEL": "true", "SAGEMAKER_SECURE_MODE": "true", **environ}
    with pytest.raises(SecurityRefused, match=why):
        resolve_folder(str(tmp_path), variables, {})


def test_a_bad_option_is_named_with_its_place(store: Path) -> None:
    with pytest.raises(
        BadConfiguration, match=r"option.dtype='nonsense' \(.*/serving.properties:2\)"
    ):
        settle(store, "option.dtype=nonsense")


def test_a_server_with_several_models_needs_none(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.dtype=fp32\nmax_models=3\n")
    flags = {"option.max_model_len": "64", "port": "0"}
    resolved = resolve_folder(str(tmp_path), {"SAGEMAKER_MULTI_MODEL": "True"}, flags)
    server = resolved.config.server

    assert (server.multi_model, server.max_models) == (True, 3)
    assert server.model_flags == {"option.max_model_len": "64"}
    assert [
        note
        for note in resolved.notes
        if note.startswith("option.dtype") and "its own file" in note
    ]


@pytest.mark.parametrize(
    ("asked", "environ"),
    [
        ("owner/name", {}),
        ("s3://bucket/model/", {}),
        (None, {"HF_MODEL_ID": "owner/name"}),
        (None, {"SERVING_LOAD_MODELS": "a=."}),
    ],
)
def test_a_model_that_the_start_names_is_not_served_beside_those_that_are_loaded(
    tmp_path: Path, asked: str | None, environ: dict[str, str]
) -> None:
    resolved = resolve_folder(asked, {"SAGEMAKER_MULTI_MODEL": "true", **environ}, {}, cwd=tmp_path)
    assert resolved.request is None
    [warning] = resolved.warnings
    assert warning.endswith(": not served, multi_model starts without a model")


@pytest.mark.usefixtures("vllm")
def test_engines_of_several_models_share_the_safe_range_without_meeting(store: Path) -> None:
    (store / "h" / "model" / "serving.properties").write_text("option.rolling_batch=vllm\n")
    server = ServerConfig(
        model_store=str(store), port=8080, safe_port_range=(8080, 8085), gateway_port=8085
    )
    taken_ports = {8085}
    for expected in ((8081, 8082), (8083, 8084)):
        config = resolve_model("chat", str(store / "h" / "model"), server, {RANGE: "1-9"}).config
        config = choose_free_ports(config, taken_ports)
        assert config.engine.ports == expected

        taken_ports |= set(config.engine.ports)

    with pytest.raises(OutOfMemory, match="safe_port_range=8080-8085: 0 ports are left"):
        choose_free_ports(config, taken_ports)

    assert choose_free_ports(settle(store).config, taken_ports).engine.ports == ()
