"""`scripts/compose.yaml`: it parses, names targets that there are, and starts the image as the
pages say.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmi.cli import lmi
from lmi.settings.config import ServerConfig

ROOT = Path(__file__).parents[2]
FILE = ROOT / "scripts" / "compose.yaml"
COMPOSE = yaml.safe_load(FILE.read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
STAGES = set(re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
# The fields of the compose specification that the file uses.
TOP = {"name", "networks", "services", "x-server"}
FIELDS = set(
    "build cap_drop command deploy environment healthcheck image networks ports profiles read_only "
    "security_opt "
    "shm_size stop_grace_period tmpfs volumes".split()
)


def test_it_has_only_fields_of_the_compose_specification() -> None:
    assert COMPOSE.keys() <= TOP
    for service in SERVICES.values():
        assert service.keys() <= FIELDS
        assert set(service.get("networks", ())) <= COMPOSE["networks"].keys()


def test_each_profile_has_one_server_and_the_gateway_beside_it() -> None:
    assert {name: service["profiles"] for name, service in SERVICES.items()} == {
        "cpu": ["cpu"],
        "gpu": ["gpu"],
        "gateway": ["cpu", "gpu"],
    }


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_built_from_a_target_of_the_dockerfile_and_read_only(name: str) -> None:
    service = SERVICES[name]
    assert service["build"]["target"] in STAGES
    assert (FILE.parent / service["build"]["context"]).resolve() == ROOT
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert [mount.partition(":")[0] for mount in service["tmpfs"]] == ["/tmp"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_a_server_serves_the_folder_that_MODEL_names_and_else_the_demo(name: str) -> None:
    service = SERVICES[name]
    [mount] = service["volumes"]
    assert (mount["type"], mount["target"], mount["read_only"]) == ("bind", "/opt/ml/model", True)

    match = re.fullmatch(r"\$\{MODEL:-(\S+)\}", mount["source"])
    assert match and (FILE.parent / match[1] / "config.json").is_file()
    assert service["command"][0] in lmi.commands
    assert service["ports"] == [f"127.0.0.1:{ServerConfig().port}:{ServerConfig().port}"]

    delay_s = float(service["environment"]["SERVING_DRAIN_DELAY"])
    assert delay_s > 0, "a load balancer has time to look elsewhere"
    assert (
        float(service["stop_grace_period"].removesuffix("s"))
        >= delay_s + ServerConfig().drain_timeout_s + 4
    )


def test_only_the_gpu_profile_reserves_gpus_and_shared_memory() -> None:
    [devices] = SERVICES["gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices["capabilities"] == ["gpu"] and SERVICES["gpu"]["shm_size"]
    assert "deploy" not in SERVICES["cpu"]


def test_the_gateway_asks_whichever_server_runs() -> None:
    command = SERVICES["gateway"]["command"]
    host = re.fullmatch(r"http://(\w+):8080", command[command.index("--endpoint") + 1])
    assert command[0] == "gateway" and host
    assert all(
        host[1] in SERVICES[name]["networks"]["default"]["aliases"] for name in ("cpu", "gpu")
    )
