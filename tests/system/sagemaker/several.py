"""A server with several models, and the folders of its models.

with several_models() as server:
    url = server.model("first", "option.echo_step_ms=1")
    assert server.load("first", url).status == 200
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.served import Server, resident_bytes
from tests.system.container import Answer, write_model

# Of the engines of these tests, which do not list what their options are.
OF_ENGINES = "load_s,echo_step_ms,echo_die_token,echo_max_num_sequences"


@dataclass
class SeveralServer(Server):
    store: Path = field(default_factory=Path)

    def model(self, name: str, *settings: str, engine: str = "echo") -> str:
        """Write the folder of a model, as the platform unpacks one. Returns its url."""
        folder = self.store / name / "model"
        folder.mkdir(parents=True, exist_ok=True)
        write_model(folder)
        (folder / "serving.properties").write_text(
            "\n".join([f"option.rolling_batch={engine}", *settings]) + "\n"
        )
        return str(folder)

    def load(self, name: str, url: str) -> Answer:
        return self.request("POST", "/models", {"model_name": name, "url": url}, timeout_s=60.0)

    def unload(self, name: str) -> Answer:
        return self.request("DELETE", f"/models/{name}", timeout_s=60.0)

    def invoke(
        self, name: str, prompt: str = "abc", num_tokens: int = 4, stream: bool = False
    ) -> Answer:
        body = {"inputs": prompt, "parameters": {"max_new_tokens": num_tokens}, "stream": stream}
        return self.request("POST", f"/models/{name}/invoke", body)

    def described(self, name: str) -> dict[str, Any]:
        answer = self.request("GET", f"/models/{name}")
        answer_body: dict[str, Any] = json.loads(answer.body) | {"code": answer.status}
        return answer_body

    def listed(self, query: str = "") -> dict[str, Any]:
        page: dict[str, Any] = json.loads(self.request("GET", f"/models{query}").body)
        return page

    def folders(self) -> list[str]:
        """The folders of models in the runtime folder."""
        [runtime] = Path(self.environ["TMPDIR"]).glob("lmi-*")
        return sorted(path.name for path in runtime.iterdir() if path.name.isdecimal())

    def resident_bytes(self) -> int:
        return sum(map(resident_bytes, self.pids()))


def error_of(answer: Answer) -> str:
    """The message of a fault in the LMI API's shape."""
    fault = json.loads(answer.body)
    assert fault["code"] == answer.status
    return str(fault["error"])


@contextmanager
def several_models(
    *settings: str, environ: Mapping[str, str] | None = None
) -> Iterator[SeveralServer]:
    """A server without a model that is ready for some. It is switched on as the
    platform does it.
    """
    with tempfile.TemporaryDirectory(prefix="lmi-several-") as name:
        folder = Path(name)
        for part in ("tmp", "models", "empty"):
            (folder / part).mkdir()

        lines = ["log_format=json", *settings]
        (folder / "empty" / "serving.properties").write_text("\n".join(lines) + "\n")
        platform = {"SAGEMAKER_MULTI_MODEL": "True", "SERVING_MODEL_STORE": str(folder / "models")}
        platform |= {
            "TMPDIR": str(folder / "tmp"),
            "OMP_NUM_THREADS": "1",
            "SERVING_ALLOW_MODEL_OPTIONS": OF_ENGINES,
        }
        server = SeveralServer(
            folder / "empty",
            folder / "log",
            environ={**platform, **(environ or {})},
            store=folder / "models",
        )
        try:
            server.start()
            server.wait_ready()
            yield server
        finally:
            server.kill()
