"""A container with several models, which keeps the contract of multi-model endpoints and has room
for a few.

A model is a folder with a file say.txt. An invocation answers with its text, so a test sees which
files were loaded.
"""

from __future__ import annotations

import json
import threading
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

from tests.gateway.gateways import Talk, whole


def write_model(folder: Path, say: str) -> None:
    folder.mkdir(parents=True)
    (folder / "say.txt").write_text(say)


class ModelServer:
    """The script of such a container. `calls` has method, path and status of each call that changes
    something.
    """

    def __init__(self, num_places: int = 2) -> None:
        self.num_places = num_places
        self.loaded: dict[str, str] = {}  # text by name
        self.calls: list[tuple[str, str, int]] = []
        self.may_load = threading.Event()
        self.may_load.set()
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._folders: dict[str, str] = {}
        self._lock = threading.Lock()

    def __call__(self, talk: Talk) -> None:
        method = talk.seen.method
        path = urlsplit(talk.seen.path).path
        name = path.removeprefix("/models").strip("/")
        if method == "POST" and name.endswith("/invoke"):
            status, answer = self._invoke(name.removesuffix("/invoke"), talk)
        elif method == "POST":
            status, answer = self._load(**json.loads(talk.seen.body))
        elif method == "DELETE":
            status, answer = self._unload(name)
        else:
            status, answer = self._describe(name)

        if method != "GET":
            self.calls.append((method, path, status))

        whole(json.dumps(answer).encode(), status, "Content-Type: application/json")(talk)

    def num_calls(self, method: str, path: str = "/models") -> int:
        return sum(call[:2] == (method, path) for call in self.calls)

    def _load(self, model_name: str, url: str) -> tuple[int, object]:
        self.may_load.wait(60)
        with self._lock:
            if model_name in self.loaded:
                return HTTPStatus.CONFLICT, {"error": "loaded", "code": 409}

            if len(self.loaded) >= self.num_places:
                return HTTPStatus.INSUFFICIENT_STORAGE, {"error": "no room", "code": 507}

            say = Path(url) / "say.txt"
            if not say.is_file():
                return HTTPStatus.BAD_REQUEST, {"error": f"{url} is no model", "code": 400}

            self.loaded[model_name] = say.read_text()
            self._folders[model_name] = url
            return HTTPStatus.OK, {"status": f'Model "{model_name}" registered.'}

    def _unload(self, name: str) -> tuple[int, object]:
        with self._lock:
            if self.loaded.pop(name, None) is None:
                return HTTPStatus.NOT_FOUND, {"error": f"no model {name}", "code": 404}

            return HTTPStatus.OK, {"status": f'Model "{name}" unregistered'}

    def _describe(self, name: str) -> tuple[int, object]:
        with self._lock:
            described = [
                self._described(model_name)
                for model_name in sorted(self.loaded)
                if name in ("", model_name)
            ]

        if not name:
            return HTTPStatus.OK, {"models": described}

        return (
            (HTTPStatus.OK, described[0])
            if described
            else (HTTPStatus.NOT_FOUND, {"error": "no", "code": 404})
        )

    def _described(self, name: str) -> dict[str, str]:
        return {"modelName": name, "modelUrl": self._folders[name], "status": "READY"}

    def _invoke(self, name: str, talk: Talk) -> tuple[int, object]:
        say = self.loaded.get(name)
        self.may_answer.wait(60)
        if say is None:
            return HTTPStatus.NOT_FOUND, {"error": f"no model {name}", "code": 404}

        target = talk.seen.header("X-Amzn-SageMaker-Target-Model")
        return HTTPStatus.OK, {"say": say, "target": target, "body": talk.seen.body.decode()}
