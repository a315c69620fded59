"""Servers that root starts, whose front ends, gateway, engines and user code run as another user
(`option.user`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import site
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.served import Server
from tests.system.container import ROOT, free_port, wait_until, write_model

NOBODY = 65534
# The capabilities that Docker leaves to root
OF_CONTAINERS = (
    0,
    1,
    3,
    4,
    5,
    6,
    7,
    8,
    10,
    13,
    18,
    27,
    29,
    31,
)
PYTHON = f"/usr/bin/python3.{sys.version_info.minor}"
Make = Callable[..., Server]

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can start processes as another user"
)

HANDLER = """
import json, os
from djl_python import Input, Output

def handle(inputs):
    if inputs.is_empty():
        return None
    found = {"uid": os.getuid(), "groups": os.getgroups(), "home": os.environ["HOME"]}
    for path in json.loads(inputs.get_as_bytes()):
        try:
            found[path] = len(open(path, "rb").read())
        except OSError as error:
            found[path] = error.strerror
    return Output().add_as_json(found)
"""


def is_reachable(path: str) -> bool:
    """Whether every user can run a program, whose folder may be root's only."""
    parts = [Path(path).resolve(), *Path(path).resolve().parents]
    return parts[0].exists() and all(part.stat().st_mode & stat.S_IXOTH for part in parts)


@pytest.fixture
def make() -> Iterator[Make]:
    """A function that makes a server of user nobody, in folders that every user can reach."""
    environ = {}
    python = sys.executable
    if not is_reachable(sys.executable):
        if not is_reachable(PYTHON):
            pytest.skip(f"other users can run neither {sys.executable} nor {PYTHON}")

        python = PYTHON
        environ["PYTHONPATH"] = ":".join([str(ROOT), *site.getsitepackages()])

    servers: list[Server] = []

    def make(port: int | None = None, source: str = "", **options: object) -> Server:
        home = Path(folders.enter_context(tempfile.TemporaryDirectory(prefix="lmi-")))
        home.chmod(0o755)
        (home / "tmp").mkdir()
        (home / "tmp").chmod(0o1777)
        option_values = {name.replace("__", "."): value for name, value in options.items()}
        folder = write_model(
            home / "model", **{"option.user": "nobody", "frontend_workers": 2, **option_values}
        )
        if source:
            (folder / "model.py").write_text(source)

        more = {"TMPDIR": str(home / "tmp"), "SERVING_DOWNLOAD_DIR": str(home / "cache"), **environ}
        servers.append(Server(folder, home / "log", port or free_port(), more, python=python))
        return servers[-1]

    with ExitStack() as folders:
        yield make
        for started in servers:
            started.kill()


def uids(server: Server) -> dict[str, set[int]]:
    """The user ids of every process of a server, by its name."""
    uids_of: dict[str, set[int]] = {}
    for pid in server.pids():
        status = Path(f"/proc/{pid}/status").read_text()
        name = re.sub(r"-\d+$", "", status.split()[1])
        uids_of.setdefault(name, set()).update(
            map(int, re.findall(r"^[UG]id:\s(.*)$", status, re.M)[0].split())
        )

    return uids_of


SPY = r"""
#include <stdio.h>
#include <unistd.h>
__attribute__((constructor)) static void write_down(void) {
    FILE *file = fopen(PLACE, "a");
    if (file) { fprintf(file, "%d\n", getuid()); fclose(file); }
}
"""


class Spy:
    """A library that notes the user of each process that loads it. Everybody may write into its
    folder.
    """

    def __init__(self, folder: Path) -> None:
        source = folder / "spy.c"
        self.file = folder / "spy.so"
        self._noted = folder / "spied"
        source.write_text(SPY)
        compiler = shutil.which("cc") or pytest.skip("there is no C compiler")
        place = f'-DPLACE="{self._noted}"'
        subprocess.run([compiler, "-shared", "-fPIC", place, "-o", self.file, source], check=True)

    def uids(self) -> set[int]:
        return set(map(int, self._noted.read_text().split())) if self._noted.exists() else set()


def test_all_but_the_supervisor_run_as_the_user_and_the_log_says_what_the_models_file_gives_them(
    make: Make,
) -> None:
    gateway_port = free_port()
    server = make(with_gateway=gateway_port)
    spy = Spy(Path(server.environ["TMPDIR"]))
    with open(server.folder / "serving.properties", "a") as properties:
        properties.write(f"option.env=LD_PRELOAD={spy.file}\n")

    server.start_and_wait()
    assert spy.uids() == {NOBODY}
    assert "the model's own file switches on variables of processes" in server.log.read_text()

    assert server.generate(5).status == 200
    assert server.post({"inputs": "abc"}, "/generate").status == 200

    connection = HTTPConnection("127.0.0.1", gateway_port, timeout=60)
    connection.request("POST", "/endpoints/any/invocations", json.dumps({"inputs": "abc"}))
    assert connection.getresponse().status == 200

    connection.close()
    uids_of = uids(server)

    assert uids_of == {
        "lmi-supervisor": {0},
        **dict.fromkeys(("lmi-front", "lmi-gateway", "lmi-gunicorn", "lmi-engine"), {NOBODY}),
    }


def test_a_killed_front_end_master_and_engine_come_back_with_their_users(make: Make) -> None:
    server = make().start_and_wait()
    before = uids(server)
    for name in ("lmi-gunicorn", "lmi-engine"):
        old = server.pid(name)
        os.kill(old, signal.SIGKILL)
        wait_until(lambda: server.pids(name) not in ([], [old]), f"there is a new {name}")  # noqa: B023
        wait_until(
            lambda: server.ping() == 200 and server.generate(3).status == 200, "it serves again"
        )

    for front_end in server.pids("lmi-front"):
        os.kill(front_end, signal.SIGKILL)

    wait_until(
        lambda: server.ping() == 200 and uids(server) == before, "every process has its user"
    )
    assert server.generate(3).status == 200

    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert not list(Path(server.environ["TMPDIR"]).iterdir())


def test_the_user_cannot_change_what_root_reads_in_the_runtime_folder_nor_read_the_keys(
    make: Make, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-of-root\n")
    keys.chmod(0o600)
    server = make(option__api_key_file=keys)
    server.start()
    server.wait_200()

    assert [
        server.post({"inputs": "abc"}, headers={"x-api-key": key}).status
        for key in ("sk-of-root", "")
    ] == [
        200,
        401,
    ]

    [folder] = Path(server.environ["TMPDIR"]).iterdir()
    for place, settings in ((folder, "server.json"), (folder / "1", "config.json")):
        status_of_place = place.stat()
        assert (
            status_of_place.st_uid,
            status_of_place.st_gid,
            stat.S_IMODE(status_of_place.st_mode),
        ) == (0, NOBODY, 0o1770)

        status_of_place = (place / settings).stat()
        assert (status_of_place.st_uid, stat.S_IMODE(status_of_place.st_mode)) == (0, 0o640)

    status_of_place = (folder / "1" / "engine-0.sock").stat()
    assert (status_of_place.st_uid, stat.S_IMODE(status_of_place.st_mode)) == (NOBODY, 0o600)


BACKEND = """
import os, zipfile

NAME = "a_small_thing-1.0"

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    module = [f"UID={os.getuid()}", *(f"{name}={int(name in os.environ)}" for name in ("A_TOKEN", "PIP_EXTRA_TOKEN"))]
    wheel = "Wheel-Version: 1.0\\nGenerator: tests\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    content = {
        "a_small_thing.py": "\\n".join(module),
        f"{NAME}.dist-info/METADATA": "Metadata-Version: 2.1\\nName: a_small_thing\\nVersion: 1.0\\n",
        f"{NAME}.dist-info/WHEEL": wheel,
        f"{NAME}.dist-info/RECORD": "",
    }
    file = f"{NAME}-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(wheel_directory, file), "w") as archive:
        for path, text in content.items():
            archive.writestr(path, text)
    return file
"""  # noqa: E501


def write_project(folder: Path) -> None:
    """Write the source of a package. It notes who builds it, and which secrets are there then."""
    folder.mkdir()
    (folder / "backend.py").write_text(BACKEND)
    system = [
        "[build-system]",
        "requires = []",
        'build-backend = "backend"',
        'backend-path = ["."]',
    ]
    (folder / "pyproject.toml").write_text("\n".join(system))


def test_user_code_runs_as_the_user_with_what_its_requirements_name(make: Make) -> None:
    source = "import a_small_thing\n" + HANDLER
    server = make(
        option__rolling_batch="disable",
        option__entryPoint="model.py",
        engine="Python",
        source=source,
    )
    write_project(server.folder / "a_small_thing")
    (server.folder / "requirements.txt").write_text("./a_small_thing\n")
    server.environ |= {"A_TOKEN": "canary", "PIP_EXTRA_TOKEN": "of the index"}
    server.start_and_wait()
    [module] = Path(server.environ["SERVING_DOWNLOAD_DIR"]).glob("requirements/*/a_small_thing.py")
    built_as, *variables_seen = module.read_text().split()
    assert (built_as, variables_seen) == (f"UID={NOBODY}", ["A_TOKEN=0", "PIP_EXTRA_TOKEN=1"])

    for path in (module, module.parent):
        assert path.stat().st_uid == 0 and not path.stat().st_mode & 0o022

    [supervisor] = server.pids("lmi-supervisor")
    environ = f"/proc/{supervisor}/environ"
    memory = f"/proc/{supervisor}/mem"
    probe = json.loads(server.post([environ, memory, "/proc/self/environ"]).body)

    assert (probe["uid"], probe["groups"]) == (NOBODY, [NOBODY])
    assert (
        probe[environ] == probe[memory] == "Permission denied" and probe["/proc/self/environ"] > 0
    )
    assert probe["home"] != os.environ["HOME"]
    assert uids(server)["lmi-code"] == {NOBODY}


@pytest.mark.parametrize(
    "drop",
    [
        pytest.param(f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})", id="nobody"),
        pytest.param(
            f"import ctypes; [ctypes.CDLL(None).prctl(24, one) for one in range(41) if one not in "
            f"{OF_CONTAINERS}]",
            id="root",
        ),
    ],
)
def test_code_of_the_supervisors_own_user_cannot_read_its_environment(
    make: Make, drop: str
) -> None:
    server = make(
        source=HANDLER,
        option__rolling_batch="disable",
        option__entryPoint="model.py",
        engine="Python",
    )
    properties = server.folder / "serving.properties"
    properties.write_text(properties.read_text().replace("option.user=nobody\n", ""))
    server.environ["A_TOKEN"] = "canary"
    server.command_prefix = [
        server.python,
        "-c",
        f"import os, sys; {drop}\nos.execv(sys.argv[1], sys.argv[1:])",
    ]
    server.start_and_wait()
    environ, memory = (
        f"/proc/{server.pid('lmi-supervisor')}/{name}" for name in ("environ", "mem")
    )
    probe = json.loads(server.post([environ, memory, "/proc/self/environ"]).body)

    assert (
        probe[environ] == probe[memory] == "Permission denied" and probe["/proc/self/environ"] > 0
    )
    assert Path(f"/proc/{server.pid('lmi-code')}/oom_score_adj").read_text().strip() == "500"


def test_a_model_that_a_client_loads_runs_as_the_user_and_its_file_brings_no_library_into_a_process(
    make: Make,
) -> None:
    server = make(multi_model="true")
    server.environ |= {
        "SERVING_MULTI_MODEL": "true",
        "SERVING_MODEL_STORE": str(server.folder.parent),
    }
    server.start_and_wait()
    model = write_model(server.folder.parent / "other")
    spy = Spy(Path(server.environ["TMPDIR"]))
    evil = write_model(server.folder.parent / "evil", **{"option.env": f"LD_PRELOAD={spy.file}"})
    refused = server.post({"model_name": "evil", "url": str(evil)}, "/models")

    assert refused.status == 400
    assert json.loads(refused.body)["error"].startswith(
        f"option.env ({evil}/serving.properties:3): "
    )

    assert server.post({"model_name": "other", "url": str(model)}, "/models").status == 200

    wait_until(
        lambda: server.post({"inputs": "abc"}, "/models/other/invoke").status == 200,
        "the model answers",
    )

    assert uids(server)["lmi-engine"] == {NOBODY} and spy.uids() == set()


def test_a_port_below_1024_is_bound_before_the_front_ends_are_unprivileged(make: Make) -> None:
    port = next(port for port in range(1023, 600, -1) if is_free(port))
    server = make(port).start_and_wait()
    assert server.generate(3).status == 200 and uids(server)["lmi-front"] == {NOBODY}


def is_free(port: int) -> bool:
    with socket.socket() as probe_socket:
        return probe_socket.connect_ex(("127.0.0.1", port)) != 0


def test_an_unknown_user_is_one_line(make: Make) -> None:
    server = make(option__user="nobody_like_this").start()
    assert server.wait() == 2
    message = server.last_words()["message"]
    assert (
        "option.user='nobody_like_this'" in message and "a user that this machine knows" in message
    )
    assert "Traceback" not in server.log.read_text()


def test_a_user_who_cannot_reach_the_runtime_folder_is_one_line(make: Make) -> None:
    server = make(option__user="4321:1234")
    Path(server.environ["TMPDIR"]).chmod(0o700)
    server.start()
    assert server.wait() == 2
    message = server.last_words()["message"]
    assert message.startswith(
        f"option.user=4321:1234: that user cannot use {server.environ['TMPDIR']}/lmi-"
    )


def test_only_root_may_ask_for_another_user(make: Make) -> None:
    server = make()
    server.log.touch(mode=0o666)
    change = f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})"
    server.command_prefix = [
        server.python,
        "-c",
        f"import os, sys; {change}; os.execv(sys.argv[1], sys.argv[1:])",
    ]
    server.start()
    assert server.wait() == 2

    message = server.last_words()["message"]
    assert (
        message
        == f"option.user=nobody: only root may start processes as another user, and this is user "
        f"{NOBODY}"
    )
