"""AWS's own client of streams in both directions, at a gateway: `scripts/bidirectional-client`.

The client is not changed. It has no setting for a certificate, so the program that uses it makes
its TLS anew. The gateway checks every signature, that of each event too. Exits with 1 if an answer
is not what it must be.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.clients.venvs import ROOT, python_of
from tests.gateway.gateways import CREDENTIALS, REGION, gateway
from tests.served import serve

DEMO = ROOT / "handlers" / "lmi_dist" / "demo"
PROGRAM = ROOT / "tests" / "clients" / "scripts" / "gateway" / "bidirectional_stream.py"
RUN_TIMEOUT_S = 120
CERTIFICATE = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 "
    "-subj /CN=localhost -addext subjectAltName=DNS:localhost -keyout tls.key -out tls.crt"
)


def answers(base: str, url: str, certificate: Path) -> dict[str, Any]:
    """What the program prints: for each thing that it tries, what came."""
    environ = {"PATH": os.environ["PATH"], "AWS_EC2_METADATA_DISABLED": "true", "REGION": REGION}
    done = subprocess.run(
        [str(python_of("bidirectional", base)), "-I", str(PROGRAM), url, str(certificate)],
        env=environ | CREDENTIALS,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def faults(told: dict[str, Any]) -> list[str]:
    """The names of what is not as it must be."""
    checks = {
        "variant": told["variant"] == "AllTraffic",
        "a message without a type": told["whole"][0].keys() >= {"generated_text"},
        "a message in parts, streamed": told["streamed"][-1] == {"id": "a", "end": "complete"},
        "all of a stream": sum("data" in message for message in told["streamed"]) == 5,
        "two at once": sorted(told["ends"]) == ["b", "c"],
        "a session": "x-amzn-sagemaker-new-session-id" in told["session"]["headers"],
        "an error within the stream": told["error"]["code"] == 424,
        "the end": told["after the end"] is None,
        "a path": told["chat"]["object"] == "chat.completion",
        "an unknown variant": told["refused"] == "InputValidationError",
        "an unknown path": told["no such path"] == ["ModelError", 404],
    }
    return [name for name, is_right in checks.items() if not is_right]


def main(base: str) -> int:
    with tempfile.TemporaryDirectory(prefix="lmi-bidirectional-") as folder:
        subprocess.run(CERTIFICATE.split(), cwd=folder, check=True, capture_output=True)
        certificate = Path(folder) / "tls.crt"
        tls = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(Path(folder) / "tls.key"))
        with serve(DEMO, "option.model_name=demo", "frontend_workers=1") as server:
            flags = ("--endpoint", f"http://127.0.0.1:{server.port}", "--check-signatures")
            with gateway(*flags, "--http2-port", "0", *tls, environ=CREDENTIALS) as aws:
                url = aws.http2.replace("127.0.0.1", "localhost")
                told = answers(base, url, certificate)

    what_is_wrong = faults(told)
    says = "works" if not what_is_wrong else f"wrong: {', '.join(what_is_wrong)}: {told}"
    print(f"aws-sdk-sagemaker-runtime-http2 {told['version']} at lmi gateway: {says}", flush=True)
    return 1 if what_is_wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
