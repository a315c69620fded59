"""Secure mode: what each control refuses, options and paths that may be unsafe, adapters, what was
fetched.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmi.errors import SecurityRefused
from lmi.settings.config import ServerConfig
from lmi.settings.resolve import Resolved, resolve
from lmi.settings.secure_mode import CONTROLS, check_adapter
from lmi.settings.start import StartInputs
from tests.settings.settling import CPU, settle

REQUIREMENTS = "DISALLOW_REQUIREMENTS_TXT"
SCRIPTS = "DISALLOW_CUSTOM_INFERENCE_SCRIPTS"
PICKLES = "DISALLOW_PICKLE_FILES"
REMOTE_CODE = "DISALLOW_TRUST_REMOTE_CODE"
TEMPLATE = "DISALLOW_CHAT_TEMPLATE"
HANDLE = "def handle(inputs): ...\ndef other(inputs): ...\n"


def secured(
    folder: Path, controls: str, text: str = "", flags: dict[str, str] | None = None, **environ: str
) -> Resolved:
    """Resolve in secure mode. The folder of the model is the channel that is not trusted."""
    variables = {
        "SAGEMAKER_SECURE_MODE": "True",
        "SAGEMAKER_SECURITY_CONTROLS": controls,
        "SAGEMAKER_UNTRUSTED_CHANNELS": str(folder),
        **environ,
    }
    return settle(folder, text, {name: value for name, value in variables.items() if value}, flags)


def refusal(folder: Path, controls: str, text: str = "", **environ: str) -> list[str]:
    with pytest.raises(SecurityRefused) as caught:
        secured(folder, controls, text, **environ)

    assert caught.value.exit_code == 5
    return str(caught.value).split("\n")


def write(file: Path, text: str = "") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_a_harmless_model_is_served_under_all_controls(folder: Path) -> None:
    write(folder / "tokenizer_config.json", '{"chat_template": null}')
    write(folder / "model.safetensors")
    resolved = secured(folder, ",".join(CONTROLS), "option.dtype=fp32\noption.max_model_len=99")
    assert resolved.config.server.secure_mode and resolved.warnings == ()


@pytest.mark.parametrize("controls", ["", " ", ","])
def test_secure_mode_without_controls_is_refused_with_their_names(
    folder: Path, controls: str
) -> None:
    (line,) = refusal(folder, controls)
    assert "SAGEMAKER_SECURITY_CONTROLS is missing" in line and all(
        name in line for name in CONTROLS
    )


def test_an_unknown_control_is_refused_with_its_name(folder: Path) -> None:
    (line,) = refusal(folder, f"{PICKLES},DISALLOW_EVERYTHING")
    assert "unknown control DISALLOW_EVERYTHING" in line and "SAGEMAKER_SECURITY_CONTROLS" in line


def test_a_channel_that_is_no_folder_is_refused_with_its_name(folder: Path) -> None:
    (line,) = refusal(folder, PICKLES, SAGEMAKER_UNTRUSTED_CHANNELS=f"{folder},{folder}/nowhere")
    assert (
        line.endswith(f"{folder}/nowhere is not a folder")
        and "SAGEMAKER_UNTRUSTED_CHANNELS" in line
    )


def test_without_a_channel_the_models_folder_is_searched(folder: Path, tmp_path: Path) -> None:
    write(folder / "deep" / "weights.bin")
    write(tmp_path / "elsewhere" / "weights.bin")
    lines = refusal(folder, PICKLES, SAGEMAKER_UNTRUSTED_CHANNELS="")
    assert lines == [f"{folder / 'deep' / 'weights.bin'}: refused by {PICKLES}"]
    trusted = secured(
        folder, PICKLES, SAGEMAKER_UNTRUSTED_CHANNELS=str(write(tmp_path / "c" / "x").parent)
    )
    assert trusted.warnings == ()


def test_without_a_channel_a_model_inside_the_served_folder_is_named_once(folder: Path) -> None:
    write(folder / "inner" / "config.json", "{}")
    write(folder / "inner" / "chat_template.jinja")
    lines = refusal(folder, TEMPLATE, "option.model_id=inner", SAGEMAKER_UNTRUSTED_CHANNELS="")
    assert lines == [f"{folder / 'inner' / 'chat_template.jinja'}: refused by {TEMPLATE}"]


FILES = {
    REQUIREMENTS: "requirements.txt",
    SCRIPTS: "model.py",
    PICKLES: "deep/er/Weights.PTH",
    TEMPLATE: "tokenizer_config.json",
}


@pytest.mark.parametrize("control", FILES)
def test_each_control_refuses_its_files_and_no_others(folder: Path, control: str) -> None:
    for name in FILES.values():
        write(
            folder / name,
            '{"chat_template": "{{ messages }}"}' if name.endswith(".json") else HANDLE,
        )

    assert refusal(folder, control) == [f"{folder / FILES[control]}: refused by {control}"]


def test_all_controls_together_name_every_file_and_option(folder: Path) -> None:
    for name in FILES.values():
        write(folder / name, '{"chat_template": "x"}' if name.endswith(".json") else HANDLE)

    lines = refusal(
        folder, ",".join(CONTROLS), "option.trust_remote_code=true\noption.allow_pickle=true"
    )
    assert len(lines) == len(FILES) + 2
    assert all(any(control in line for line in lines) for control in CONTROLS)


@pytest.mark.parametrize("name", ["a.bin", "b.PT", "c.pth", "d.Ckpt", "e/f/g.pkl"])
def test_a_pickle_of_any_case_and_depth_is_found(folder: Path, name: str) -> None:
    write(folder / name)
    assert refusal(folder, PICKLES) == [f"{folder / name}: refused by {PICKLES}"]


def test_a_pickle_behind_a_link_is_found_and_a_loop_of_links_ends(
    folder: Path, tmp_path: Path
) -> None:
    write(tmp_path / "elsewhere" / "w.bin")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "loop").symlink_to(folder)
    assert refusal(folder, PICKLES) == [f"{folder / 'linked' / 'w.bin'}: refused by {PICKLES}"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chat_template.jinja", ""),
        ("chat_template.json", "{}"),
        ("deep/tokenizer_config.json", '{"chat_template": [{"name": "default", "template": "x"}]}'),
        ("tokenizer_config.json", "not JSON"),
    ],
)
def test_a_chat_template_is_found_in_each_file_that_may_hold_one(
    folder: Path, name: str, text: str
) -> None:
    write(folder / name, text)
    assert refusal(folder, TEMPLATE) == [f"{folder / name}: refused by {TEMPLATE}"]


@pytest.mark.parametrize(
    ("control", "text"),
    [
        (SCRIPTS, "option.entryPoint=other.py"),
        (SCRIPTS, "option.handler=other\noption.entryPoint=other.py"),
        (SCRIPTS, "option.output_formatter=other\noption.entryPoint=other.py"),
        (SCRIPTS, "option.logits_post_processors=other.py"),
        (PICKLES, "option.allow_pickle=true"),
        (REMOTE_CODE, "option.trust_remote_code=true"),
        (TEMPLATE, "option.chat_template={{ messages }}"),
    ],
)
def test_each_control_refuses_its_options(folder: Path, control: str, text: str) -> None:
    write(folder / "other.py", HANDLE)
    lines = refusal(folder, control, text)
    key, _, value = text.partition("\n")[0].partition("=")
    assert f"{key}={value} (serving.properties:1): refused by {control}" in lines
    other_controls = ",".join(set(CONTROLS) - {control})
    assert secured(folder, other_controls, text).config.server.secure_mode


def test_an_entry_point_of_the_reference_is_no_script(folder: Path) -> None:
    assert (
        secured(
            folder,
            SCRIPTS,
            "option.entryPoint=djl_python.huggingface\noption.output_formatter=json",
        ).warnings
        == ()
    )


@pytest.mark.parametrize(
    "option",
    [
        "option.env=LD_PRELOAD=/opt/ml/model/evil.so",
        "option.load_format=pt",
        "option.tokenizer=/etc",
        "option.hf_overrides={}",
        "option.anything=1",
    ],
)
def test_an_option_that_is_not_known_to_be_safe_is_refused(folder: Path, option: str) -> None:
    (line,) = refusal(folder, REMOTE_CODE, option)
    assert (
        line
        == f"{option.partition('=')[0]} (serving.properties:1): secure mode does not allow this "
        f"option"
    )


@pytest.mark.parametrize(
    "option",
    [
        "option.load_format=safetensors",
        "option.revision=main",
        "option.seed=1",
        "option.enable_prefix_caching=true",
    ],
)
def test_an_option_that_is_known_to_be_safe_is_not(folder: Path, option: str) -> None:
    assert secured(folder, REMOTE_CODE, option).config.server.secure_mode


@pytest.mark.parametrize("name", ["OPTION_ENV", "OPTION_HF_OVERRIDES"])
def test_an_option_from_the_environment_is_checked_too(folder: Path, name: str) -> None:
    (line,) = refusal(folder, REMOTE_CODE, **{name: "A=1"})
    assert name in line


def test_the_file_that_comes_with_the_model_cannot_switch_it_off(folder: Path) -> None:
    assert secured(folder, PICKLES, "secure_mode=false").config.server.secure_mode


@pytest.mark.parametrize(
    ("text", "without"),
    [
        (f"security_controls={REMOTE_CODE}", "SAGEMAKER_SECURITY_CONTROLS"),
        ("untrusted_channels=/tmp", "SAGEMAKER_UNTRUSTED_CHANNELS"),
        ("download_dir=/", ""),
        ("model_store=/", ""),
    ],
)
def test_the_file_that_comes_with_the_model_cannot_weaken_it(
    folder: Path, text: str, without: str
) -> None:
    lines = refusal(folder, PICKLES, text, **({without: ""} if without else {}))
    assert lines == [
        f"{text.partition('=')[0]} (serving.properties:1): "
        "in secure mode only the environment or the command line may give it"
    ]


PATHS = ["option.model_id", "option.speculative_draft_model", "option.chat_template"]


@pytest.mark.parametrize("key", PATHS)
def test_a_path_outside_of_the_models_folder_is_refused(
    folder: Path, tmp_path: Path, key: str
) -> None:
    write(tmp_path / "other" / "config.json", "{}")
    for text in (str(tmp_path / "other"), "../other"):
        lines = refusal(folder, PICKLES, f"{key}={text}")
        assert any(
            line.startswith(f"{key} (serving.properties:1): {tmp_path / 'other'} is outside")
            for line in lines
        )


def test_a_link_out_of_the_models_folder_is_followed(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "other" / "config.json", "{}")
    (folder / "inside").symlink_to(tmp_path / "other")
    (line,) = refusal(folder, PICKLES, "option.speculative_draft_model=inside")
    assert str(tmp_path / "other") in line


@pytest.mark.parametrize("text", ["inside", "owner/name"])
def test_a_folder_inside_and_a_name_on_a_hub_are_no_path_outside(folder: Path, text: str) -> None:
    write(folder / "inside" / "config.json", "{}")
    assert secured(
        folder, PICKLES, f"option.speculative_draft_model={text}"
    ).config.server.secure_mode


def test_download_dir_is_a_place_for_models_where_the_operator_gives_it(
    folder: Path, tmp_path: Path
) -> None:
    write(tmp_path / "cache" / "draft" / "config.json", "{}")
    draft = f"option.speculative_draft_model={tmp_path / 'cache' / 'draft'}"
    refusal(folder, PICKLES, draft)
    assert secured(
        folder, PICKLES, draft, SERVING_DOWNLOAD_DIR=str(tmp_path / "cache")
    ).config.server.secure_mode


def server(tmp_path: Path, *controls: str, secure_mode: bool = True) -> ServerConfig:
    return ServerConfig(
        secure_mode=secure_mode, security_controls=controls, download_dir=str(tmp_path / "cache")
    )


def refused_adapter(config: ServerConfig, folder: Path, model: Path) -> list[str]:
    with pytest.raises(SecurityRefused) as caught:
        check_adapter(config, folder, model)

    return str(caught.value).split("\n")


def test_an_adapter_is_searched_for_everything(folder: Path, tmp_path: Path) -> None:
    adapter = folder / "adapters" / "one"
    for name in FILES.values():
        write(adapter / name, json.dumps({"chat_template": "x"}))

    assert len(refused_adapter(server(tmp_path, *FILES), adapter, folder)) == len(FILES)
    check_adapter(server(tmp_path, REMOTE_CODE), adapter, folder)
    check_adapter(server(tmp_path, *FILES, secure_mode=False), adapter, folder)


def test_an_adapter_outside_of_the_models_folder_and_of_download_dir_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    adapter = write(tmp_path / "other" / "adapter_config.json", "{}").parent
    (line,) = refused_adapter(server(tmp_path, PICKLES), adapter, folder)
    assert str(adapter) in line and "outside" in line
    fetched = write(tmp_path / "cache" / "fetched" / "adapter_config.json", "{}").parent
    check_adapter(server(tmp_path, PICKLES), fetched, folder)


def test_what_was_fetched_is_searched_and_may_lie_anywhere(folder: Path, tmp_path: Path) -> None:
    model = write(tmp_path / "hub" / "model" / "config.json", "{}").parent
    draft = write(tmp_path / "hub" / "draft" / "config.json", "{}").parent
    environ = {
        "SAGEMAKER_SECURE_MODE": "true",
        "SAGEMAKER_SECURITY_CONTROLS": f"{PICKLES},{SCRIPTS}",
    }
    environ |= {"OPTION_MODEL_ID": "owner/model", "OPTION_SPECULATIVE_DRAFT_MODEL": "owner/draft"}

    def settled() -> Resolved:
        fetched = {"owner/model": model, "owner/draft": draft}
        return resolve(StartInputs(cwd=tmp_path, machine=CPU, environ=environ, fetched=fetched))

    assert settled().config.model.path == str(model)

    pickle = write(draft / "unpacked" / "weights.pkl")
    script = write(model / "model.py", HANDLE)
    with pytest.raises(SecurityRefused) as caught:
        settled()

    lines = {f"{script}: refused by {SCRIPTS}", f"{pickle}: refused by {PICKLES}"}
    assert set(str(caught.value).split("\n")) == lines
