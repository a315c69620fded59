"""The environment of children: they get no secrets, and each engine gets the right number of
threads.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lmi.settings.config import (
    Config,
    EngineConfig,
    ModelConfig,
    RequirementsConfig,
    ServerConfig,
    UserCodeConfig,
)
from lmi.supervisor.code import of_user_code
from lmi.supervisor.kinds import (
    environ_of_child,
    environ_of_engine,
    environ_of_front_end,
    environ_of_server,
    without_secrets,
)


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_ACCESS_KEY_ID",
    ]
    + [
        "DB_PASSWORD",
        "OPENAI_API_KEY",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "aws_secret_access_key",
    ]
    + [
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
    ]
    + ["AWS_SHARED_CREDENTIALS_FILE", "AWS_BEARER_TOKEN_BEDROCK", "HF_TOKEN_PATH", "PIP_INDEX_URL"]
    + [
        "PAT",
        "GITHUB_PAT",
        "azure_devops_pat",
        "PRIVATE_KEY",
        "SSH_PRIVATE_KEY_PATH",
        "PASSPHRASE",
        "KEY_PASSPHRASE",
    ]
    + [
        "AUTH_HEADER",
        "BASIC_AUTH",
        "AUTH",
        "PROXY_AUTHORIZATION",
        "SENTRY_DSN",
        "SESSION_COOKIE",
        "COOKIES",
        "DB_PASS",
    ]
    + [
        "MYSQL_PWD",
        "AZURE_STORAGE_CONNECTION_STRING",
        "AZURE_STORAGE_KEY",
        "SIGNING_KEY",
        "NPM_CONFIG__AUTH",
    ]
    + ["OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_METRICS_HEADERS"],
)
def test_a_secret_is_kept_from_front_ends_engines_and_user_code(name: str) -> None:
    assert without_secrets({name: "x", "PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize(
    "name",
    [
        "TOKENIZERS_PARALLELISM",
        "PATH",
        "LMI_RUNTIME_DIR",
        "AWS_REGION",
        "KEYMAP",
        "HF_ENDPOINT",
        "MASTER_ADDR",
    ]
    + [
        "NCCL_PATTERN",
        "PAT_SIZE",
        "PYTHONPATH",
        "MPATH",
        "VLLM_CACHE_ROOT",
        "PUBLIC_KEY",
        "SSH_PUBLIC_KEY",
        "PWD",
    ]
    + [
        "OLDPWD",
        "AUTHOR",
        "GIT_AUTHOR_NAME",
        "PASSIVE",
        "BYPASS_CACHE",
        "LMI_KEYS_PER_BLOCK",
        "XAUTHORITY",
    ],
)
def test_what_is_no_secret_stays(name: str) -> None:
    assert without_secrets({name: "x"}) == {name: "x"}


@pytest.mark.parametrize(
    ("value", "is_secret"),
    [
        ("postgres://user:password@host/db", True),
        ("redis://:password@host:6379", True),
        ("https://a_token@host", True),
        ("--proxy http://user:password@host", True),
        ("https://huggingface.co", False),
        ("https://host/path@2?to=a@b.c", False),
        ("tcp://10.0.0.1:29500", False),
        ("user@host", False),
    ],
)
def test_an_address_with_a_password_is_a_secret_whatever_its_name(
    value: str, is_secret: bool
) -> None:
    assert without_secrets({"DATABASE_URL": value}) == (
        {} if is_secret else {"DATABASE_URL": value}
    )


def test_front_ends_have_the_headers_of_the_collector_of_traces_and_no_other_secret() -> None:
    headers = {
        "OTEL_EXPORTER_OTLP_HEADERS": "x-key=1",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "x-key=2",
    }
    variables = {**headers, "OTEL_EXPORTER_OTLP_LOGS_HEADERS": "x-key=3", "HF_TOKEN": "x"}
    assert environ_of_front_end(variables) == {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        **headers,
    }


def test_front_ends_and_engines_ask_no_hub_whatever_the_operator_says() -> None:
    variables = {"HF_HUB_OFFLINE": "0", "HF_TOKEN": "x", "PATH": "/bin"}
    assert environ_of_server(variables) == {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PATH": "/bin",
    }


def test_what_a_requirements_txt_names_comes_first_on_the_path_of_the_models_own_code_alone(
    tmp_path: Path,
) -> None:
    def config(code: UserCodeConfig | None, **engine: bool) -> Config:
        return Config(
            server=ServerConfig(),
            model=ModelConfig(path=str(tmp_path), name="m"),
            engine=EngineConfig(num_threads=1, **engine),
            user_code=code,
            requirements=RequirementsConfig(file="/m/requirements.txt", folder="/installed"),
        )

    code = UserCodeConfig(path="model.py", handler="handle")
    assert (
        of_user_code(config(code), {"PYTHONPATH": "/mine"}, slot=0)["PYTHONPATH"]
        == "/installed:/mine"
    )
    assert "PYTHONPATH" not in environ_of_engine(config(code), {"PYTHONPATH": "/mine"}, slot=0)
    assert (
        environ_of_engine(config(None, trust_remote_code=True), {}, slot=0)["PYTHONPATH"]
        == "/installed"
    )


def test_other_engines_get_none_of_vllm_s_variables() -> None:
    other_config = Config(
        server=ServerConfig(),
        model=ModelConfig(path="/m", name="m"),
        engine=EngineConfig(num_threads=1),
    )
    assert environ_of_engine(other_config, {}, slot=0) == {}


@pytest.mark.parametrize("handler", ["lmi-dist", "vllm"])
def test_engines_have_the_variables_of_option_env_above_all_others(handler: str) -> None:
    variables = {"OMP_NUM_THREADS": "7", "HF_HUB_OFFLINE": "0", "MINE": "a,b", "MY_TOKEN": "t"}
    engine = EngineConfig(handler=handler, environ=variables)
    config = Config(server=ServerConfig(), model=ModelConfig(path="/m", name="m"), engine=engine)

    assert environ_of_engine(config, {"MINE": "inherited"}, slot=0).items() >= variables.items()


def test_user_code_has_the_variables_of_option_env(tmp_path: Path) -> None:
    model = ModelConfig(path=str(tmp_path), name="m")
    server = ServerConfig()
    for handler in (None, "handle"):
        code = UserCodeConfig(path="model.py", handler=handler)
        engine = EngineConfig(environ={"MY_TOKEN": "t", "OMP_NUM_THREADS": "7"})
        config = Config(server=server, model=model, engine=engine, user_code=code)
        environ = of_user_code(config, {"HF_TOKEN": "x"}, slot=0)

        assert (environ["MY_TOKEN"], environ["OMP_NUM_THREADS"], "HF_TOKEN" in environ) == (
            "t",
            "7",
            False,
        )


@pytest.mark.parametrize(
    "name", ["GUNICORN_CMD_ARGS", "GUNICORN_FD", "LISTEN_FDS", "WEB_CONCURRENCY"]
)
def test_what_would_change_how_gunicorn_starts_is_left_out(name: str) -> None:
    assert set(environ_of_child({name: "x", "PATH": "/bin"})) == {"PATH", "SPT_NOENV"}
