"""Further TCP ports come from SageMaker's safe range, without the server's own port."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmi.errors import BadConfiguration
from lmi.settings.config import Config
from tests.settings.settling import FOUR_GPUS, faults, settle

VLLM = "option.rolling_batch=vllm\n"
RANGE = "SAGEMAKER_SAFE_PORT_RANGE"


def ports(folder: Path, text: str, **environ: str) -> Config:
    return settle(folder, text, environ, machine=FOUR_GPUS).config


@pytest.mark.usefixtures("vllm")
def test_each_engine_has_two_ports_and_the_servers_own_is_left_out(folder: Path) -> None:
    config = ports(
        folder, f"{VLLM}minWorkers=2\nmaxWorkers=2\nwith_gateway=true", **{RANGE: "8080-8085"}
    )
    assert config.engine.ports == (8081, 8082, 8083, 8084)
    assert config.server.gateway_port == 8085


@pytest.mark.usefixtures("vllm")
def test_without_a_range_any_port_will_do(folder: Path) -> None:
    config = ports(folder, f"{VLLM}with_gateway=true")
    assert config.engine.ports == () and config.server.gateway_port == 8081


def test_an_engine_that_listens_nowhere_needs_no_port(folder: Path) -> None:
    config = ports(folder, "option.rolling_batch=lmi-dist", **{RANGE: "8080-8080"})
    assert config.engine.ports == ()
    with pytest.raises(BadConfiguration, match="8080-8080: no port is left"):
        ports(folder, "option.rolling_batch=lmi-dist\nwith_gateway=true", **{RANGE: "8080-8080"})


@pytest.mark.usefixtures("vllm")
def test_too_few_ports_are_a_fault_that_says_how_many_are_needed(folder: Path) -> None:
    (fault,) = faults(
        folder, f"{VLLM}maxWorkers=1", environ={RANGE: "8080-8081"}, machine=FOUR_GPUS
    )
    assert (
        fault
        == f"{'safe_port_range'}='8080-8081' ({RANGE}): allowed is a range with 2 ports beside the "
        f"server's own and given ones"
    )


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("text", "environ", "said"),
    [
        (
            "",
            {"VLLM_PORT": "7000"},
            "VLLM_PORT=7000: allowed is a port of safe_port_range, 8081-8099",
        ),
        ("", {"MASTER_PORT": "x"}, "MASTER_PORT=x: allowed is a port of safe_port_range"),
        ("option.env=VLLM_PORT=7000", {}, "VLLM_PORT=7000: allowed is a port of safe_port_range"),
        (
            "option.master_port=29501",
            {},
            "option.master_port=29501: allowed is a port of safe_port_range",
        ),
        ("option.nnodes=2", {}, "option.master_port=None: allowed is a port of safe_port_range"),
        (
            "port=8090",
            {"VLLM_PORT": "8090"},
            "VLLM_PORT=8090: allowed is a port of safe_port_range",
        ),
    ],
)
def test_a_given_port_outside_of_the_range_is_a_fault(
    folder: Path, text: str, environ: dict[str, str], said: str
) -> None:
    environ = {RANGE: "8081-8099", **environ}
    (fault,) = faults(folder, f"{VLLM}maxWorkers=1\n{text}", environ=environ, machine=FOUR_GPUS)
    assert fault.startswith(said)


@pytest.mark.usefixtures("vllm")
def test_a_given_port_of_the_range_is_taken(folder: Path) -> None:
    ports(folder, f"{VLLM}option.master_port=8090", **{RANGE: "8081-8099", "VLLM_PORT": "8099"})


@pytest.mark.usefixtures("vllm")
def test_a_given_port_is_handed_to_no_other_listener(folder: Path) -> None:
    text = f"{VLLM}maxWorkers=1\noption.master_port=8081\nwith_gateway=true"
    config = ports(folder, text, **{RANGE: "8080-8085", "VLLM_PORT": "8082"})
    assert config.engine.ports == (8083, 8084) and config.server.gateway_port == 8085


@pytest.mark.parametrize(
    ("text", "environ", "allowed"),
    [
        ("port=8082", {}, "a port that no other listener has"),
        ("with_gateway=8082", {}, "a port that no other listener has"),
        ("", {RANGE: "8090-8099"}, "a port of safe_port_range, 8090-8099"),
        (
            "",
            {RANGE: "8090-8099", "SAGEMAKER_BIND_TO_PORT": "8090"},
            "a port of safe_port_range, 8090-8099",
        ),
    ],
)
def test_a_management_port_is_one_that_is_left(
    folder: Path, text: str, environ: dict[str, str], allowed: str
) -> None:
    (fault,) = faults(folder, f"management_port=8082\n{text}", environ=environ)
    assert fault == f"management_port='8082' (serving.properties:1): allowed is {allowed}"


@pytest.mark.usefixtures("vllm")
def test_no_engine_takes_the_management_port(folder: Path) -> None:
    text = f"{VLLM}maxWorkers=1\nmanagement_port=8082\nwith_gateway=true"
    config = ports(folder, text, **{RANGE: "8080-8084"})
    assert config.engine.ports == (8081, 8083) and config.server.gateway_port == 8084
