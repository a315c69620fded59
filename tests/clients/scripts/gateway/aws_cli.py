"""The AWS CLI at a gateway: aws_cli.py FOLDER URL... . Prints the answers, and what it writes to
standard error.

Version 1 has no command for streams.
"""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from awscli.clidriver import create_clidriver

ASKED = {"inputs": "The quick brown", "parameters": {"max_new_tokens": 8}}
WRONG = {"inputs": "The quick brown", "parameters": {"max_new_tokens": 0}}


def aws(url: str, *words: str) -> dict:
    """Run one command."""
    output = io.StringIO()
    errors = io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        code = create_clidriver().main([*words, "--endpoint-url", url])

    return {"code": code, "output": output.getvalue(), "errors": errors.getvalue()}


def body_of(folder: Path, name: str, body: object) -> str:
    file = folder / f"{name}.json"
    file.write_text(json.dumps(body))
    return f"fileb://{file}"


def visit(folder: Path, url: str) -> dict:
    invoke = ("sagemaker-runtime", "invoke-endpoint", "--endpoint-name", "demo")
    answer = folder / "answer.json"
    plain = aws(url, *invoke, "--body", body_of(folder, "asked", ASKED), str(answer))
    return {
        "plain": plain | {"text": json.loads(answer.read_text())["generated_text"]},
        "refused": aws(
            url, *invoke, "--body", body_of(folder, "wrong", WRONG), str(folder / "refused.json")
        ),
        "waited": aws(url, "sagemaker", "wait", "endpoint-in-service", "--endpoint-name", "demo"),
    }


folder = Path(sys.argv[1])
print(json.dumps([visit(folder, url) for url in sys.argv[2:]]))
