"""`scripts/sagemaker WORD NAME [flags]`. Every call is checked against AWS's own model before the
first one is sent.

Exit codes: 0 done, 1 AWS or the container refused or failed, 2 flags that cannot be carried out,
130 interrupted.
"""

import os
import sys
from collections.abc import Iterable, Sequence

from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from scripts.sagemaker_kit.driver import Account, carry_out, line, rehearse
from scripts.sagemaker_kit.service_model import faults
from scripts.sagemaker_kit.steps import Command, Failed, Refused, Step, Wait
from scripts.sagemaker_kit.words import parse


def main(arguments: Sequence[str] | None = None) -> int:
    plan, options = parse(arguments)
    try:
        steps = rehearse(plan(options))
        check(steps)
        if options.dry_run:
            for step in steps:
                print(line(step))

            return 0

        account = Account(options.region, getattr(options, "endpoint_url", None), options.poll)
        show(carry_out(plan(options), account.perform))
    except (Refused, Failed) as error:
        print(f"scripts/sagemaker: {error}", file=sys.stderr)
        return 2 if isinstance(error, Refused) else 1
    except BrokenPipeError:
        # The reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"scripts/sagemaker: interrupted; {options.name} stays as it is", file=sys.stderr)
        return 130

    return 0


def check(steps: Iterable[Step]) -> None:
    """Refuse a call that breaks AWS's rules for it. What AWS may allow by now is a warning."""
    calls = [
        step.call if isinstance(step, Wait) else step
        for step in steps
        if not isinstance(step, Command)
    ]
    findings = [
        finding
        for call in calls
        for finding in faults(call.service, call.operation, call.parameters)
    ]
    for text in dict.fromkeys(finding.text for finding in findings if not finding.is_certain):
        print(f"scripts/sagemaker: warning: {text}", file=sys.stderr)

    certain = [finding.text for finding in findings if finding.is_certain]
    if certain:
        raise Refused("; ".join(dict.fromkeys(certain)))


def show(pieces: Iterable[bytes]) -> None:
    """Write each piece as it comes. A stream may break in the middle."""
    try:
        for piece in pieces:
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
    except (BotoCoreError, ClientError, HTTPError) as error:
        raise Failed(f"the stream broke: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
