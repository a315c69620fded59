"""Carries a plan out: as a rehearsal that sends nothing, or for real."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import boto3
from botocore import UNSIGNED, xform_name
from botocore.client import BaseClient
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from scripts.sagemaker_kit.steps import Call, Command, Failed, Plan, Step, Wait

RUNTIME = "sagemaker-runtime"
# An invocation is never sent twice: a second one would generate the same answer again.
RUNTIME_SETTINGS: dict[str, Any] = {"read_timeout": 3600, "retries": {"total_max_attempts": 1}}


def rehearse(plan: Plan) -> list[Step]:
    """The steps of a plan when every answer is an empty object."""
    steps: list[Step] = []

    def note(step: Step) -> dict[str, Any]:
        steps.append(step)
        return {}

    carry_out(plan, note)
    return steps


def carry_out(plan: Plan, perform: Callable[[Step], Any]) -> Iterable[bytes]:
    answer = None
    while True:
        try:
            step = plan.send(answer)
        except StopIteration as end:
            return end.value

        answer = perform(step)


def line(step: Step) -> str:
    """A step as one line of JSON. Bytes stand as text."""
    if isinstance(step, Command):
        return json.dumps({"command": list(step.words)})

    call = step.call if isinstance(step, Wait) else step
    record = {"service": call.service, "operation": call.operation, "parameters": call.parameters}
    return json.dumps(record, default=lambda body: body.decode(errors="replace"))


class Account:
    """Performs steps for real, with the credentials and the region that boto3 finds."""

    def __init__(
        self, region: str | None, runtime_url: str | None = None, poll_s: float = 15.0
    ) -> None:
        self._region = region
        self._runtime_url = runtime_url
        self._poll_s = poll_s
        self._session = boto3.session.Session()
        self._clients: dict[str, BaseClient] = {}

    def perform(self, step: Step) -> Any:
        if isinstance(step, Command):
            return self._run(step)

        return self._wait(step) if isinstance(step, Wait) else self._call(step)

    def _call(self, call: Call) -> Any:
        try:
            client = self._client(call.service, call.region or self._region)
            return getattr(client, xform_name(call.operation))(**call.parameters)
        except ClientError as error:
            message = (
                f"{error.response['Error'].get('Code')}: {error.response['Error'].get('Message')}"
            )
            if call.tolerated and re.match(call.tolerated, message):
                return None

            raise Failed(f"{call.operation}: {message}{_cause(error)}") from error
        except BotoCoreError as error:
            raise Failed(f"{call.operation}: {error}") from error

    def _wait(self, wait: Wait) -> Any:
        """Repeat the call until its status is final, and print each new status. None: it is
        tolerated to be gone.
        """
        last_status = None
        started_s = time.monotonic()
        while True:
            answer = self._call(wait.call)
            status = answer and answer[wait.status]
            if status != last_status:
                name = next(iter(wait.call.parameters.values()))
                print(
                    f"{time.monotonic() - started_s:5.0f} s  {name}: {status or 'gone'}",
                    file=sys.stderr,
                    flush=True,
                )
                last_status = status

            if status not in wait.pending:
                return answer

            time.sleep(self._poll_s)

    def _run(self, command: Command) -> None:
        try:
            done = subprocess.run(command.words, input=command.stdin, text=True, stdout=sys.stderr)
        except OSError as error:
            raise Failed(f"{command.words[0]}: {error.strerror}") from error

        if done.returncode:
            raise Failed(f"{' '.join(command.words)}: exit code {done.returncode}")

    def _client(self, service: str, region: str | None) -> BaseClient:
        if service not in self._clients:
            make = self._runtime if service == RUNTIME else self._session.client
            self._clients[service] = make(service, region_name=region)

        return self._clients[service]

    def _runtime(self, service: str, region_name: str | None) -> BaseClient:
        """At an address of the user's, such as a gateway's, neither a region nor credentials are
        needed.
        """
        settings = dict(RUNTIME_SETTINGS)
        region = region_name or self._session.region_name
        if self._runtime_url:
            region = region or "local"
            if self._session.get_credentials() is None:
                settings["signature_version"] = UNSIGNED

        config = Config(**settings)
        return self._session.client(
            service, region_name=region, endpoint_url=self._runtime_url, config=config
        )


def _cause(error: ClientError) -> str:
    """What the container answered, if SageMaker passes it on."""
    status = error.response.get("OriginalStatusCode")
    body = error.response.get("OriginalMessage")
    return f"\nthe container said {status}: {body.rstrip()}" if body else ""
