"""The command `lmi gateway`."""

from typing import Any

import click

from lmi.gateway.settings import options, settings


@click.command(
    params=options(),
    context_settings={"help_option_names": ["-h", "--help"]},
)
def gateway(**flags: Any) -> int:
    """Answer AWS's SageMaker API on this machine, in front of containers: for tests and laptops."""
    from lmi.gateway.worker import run

    return run(settings(**flags))
