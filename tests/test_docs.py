"""The pages for users: each command runs, or is held against the tool, the table or the file that
it names.

A page is followed from top to bottom in an empty folder, as its reader does: its servers are
started, requests are sent, programs run, and what the page shows is compared with what came.
Commands that need an account, a cluster, a GPU or a network are run dry, or their flags and the
names in them are looked up.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import click
import kubernetes_validate
import pytest
import yaml

from lmi.apis.openai.chat_content import TEXT_PARTS
from lmi.apis.openai.chat_images import IMAGE_PARTS
from lmi.cli import lmi
from lmi.gateway.command import gateway
from lmi.server.app import ROUTES, SERVER_ROUTES
from lmi.sources.source import NEVER
from lmi.supervisor.credentials import read_certificate
from scripts.sagemaker_kit.__main__ import main as sagemaker
from tests.clients.venvs import python_of
from tests.system.container import ENVIRON, free_port, wait_until

ROOT = Path(__file__).parent.parent
PAGES = {path.stem: path for path in sorted((ROOT / "docs").glob("*.md"))} | {
    "examples": ROOT / "examples" / "README.md"
}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:lmi|docker|kubectl|curl) [^`]+)`")
# tests/system/test_rolling.py runs the last three
SHOWN = (
    "text",
    "toml",
    "json",
    "nginx",
    "haproxy",
    "yaml",
)
START_TIMEOUT_S = 180.0
RUN_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The commands of a shell block, each on one line."""
        joined = self.text.replace("\\\n", " ")
        return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def blocks(page: str) -> list[Block]:
    text = PAGES[page].read_text()
    return [
        Block(page, text[: m.start()].count("\n") + 2, m[1], m[2]) for m in FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks(page)]
COMMANDS = [
    pytest.param(command, id=f"{block.page}:{block.line}")
    for block in BLOCKS
    for command in (block.commands if block.language == "sh" else [])
]
MENTIONS = [
    pytest.param(command, id=page)
    for page, path in PAGES.items()
    for command in INLINE.findall(FENCE.sub("", path.read_text()))
]
EXPORTED = {
    name: value
    for block in BLOCKS
    if block.language == "sh"
    for command in block.commands
    if command.startswith("export ")
    for name, value in (pair.split("=", 1) for pair in shlex.split(command)[1:])
}


# Each command is one that its tool takes.


@pytest.mark.parametrize("command", [*COMMANDS, *MENTIONS])
def test_a_command_is_one_that_its_tool_takes(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (
        "request.json",
        "stream.json",
        "requests.jsonl",
        "prompts.jsonl",
        "serve.yaml",
        "keys",
        "tls.crt",
        "tls.key",
    ):
        (tmp_path / name).write_text("{}")

    words = [expanded(word) for word in shlex.split(command)]
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)

    with chdir(tmp_path):
        CHECKS[words[0]](words[1:])


def expanded(word: str) -> str:
    return re.sub(r"\$(\w+)", lambda match: EXPORTED.get(match[1], "value"), word)


def test_no_page_installs_from_an_index_that_does_not_have_the_package() -> None:
    readme = (ROOT / "README.md").read_text()
    for page in (
        readme,
        (ROOT / "scripts" / "README.md").read_text(),
        *(path.read_text() for path in PAGES.values()),
    ):
        assert not re.search(r"pip install '?lmi", page)

    assert "`.venv/bin/lmi`" in readme and "pip install '.[torch]'" in readme


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yaml")), ids=lambda form: form.stem
)
def test_a_form_for_issues_has_only_what_forms_have(form: Path) -> None:
    document = yaml.safe_load(form.read_text())
    assert document.keys() == {"name", "description", "body"}
    for element in document["body"]:
        assert (
            {"type", "id", "attributes"}
            <= element.keys()
            <= {"type", "id", "attributes", "validations"}
        )
        assert {"label"} <= element["attributes"].keys() <= {"label", "description", "render"}


def test_the_pages_say_how_their_commands_are_found() -> None:
    assert "source .venv/bin/activate" in PAGES["sagemaker"].read_text().partition("```")[0]
    assert "buildx" in PAGES["docker"].read_text().partition("```")[0]


def test_what_troubleshooting_quotes_is_said_somewhere() -> None:
    rows = re.findall(
        r"^\| (.*?) \|", PAGES["troubleshooting"].read_text().replace(r"\|", "!"), re.MULTILINE
    )
    parts_quoted = [
        part.strip()
        for row in rows
        for quoted in re.findall("`(.*?)`", row)
        for part in quoted.split("…")
    ]
    sources = "".join(
        path.read_text()
        for folder in ("lmi", "handlers")
        for path in ROOT.glob(f"{folder}/**/*.py")
    )
    # A message is often several strings on lines of their own.
    sources = re.sub(r'"\n\s*f?"', "", sources)
    known_text = (
        sources + PAGES["options"].read_text() + PAGES["metrics"].read_text() + "<!im_end!>"
    )

    assert (
        len(parts_quoted) > 20 and [part for part in parts_quoted if part not in known_text] == []
    )


def test_the_page_of_int8_says_how_fast_it_was_measured() -> None:
    performance = PAGES["performance"].read_text()
    [measured] = re.findall(
        r"^\| int8 over float32, .*? times faster \| ([\d.]+) \|", performance, re.MULTILINE
    )
    assert re.findall(
        r"\[([\d.]+) times as fast as float32\]", PAGES["quantisation"].read_text()
    ) == [measured]


def test_what_readme_calls_not_yet_there_is_not_there() -> None:
    rows = re.findall(
        r"^\| (?:Not yet|\[Left out\].*?) \| (.*) \|$",
        (ROOT / "README.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) == 2

    row = " ".join(rows)
    paths = set(re.findall(r"`(/\S+)`", row))
    assert paths and not paths & {path for path, *_ in (*ROUTES, *SERVER_ROUTES)}

    is_there = {
        "audio": "input_audio" in (*TEXT_PARTS, *IMAGE_PARTS),
        "GGUF": "*.gguf" not in NEVER,
        "Helm": any(ROOT.glob("scripts/**/Chart.yaml")),
    }

    assert [word for word in is_there if word not in row or is_there[word]] == []


def test_the_code_of_an_example_that_a_page_shows_is_that_of_its_file() -> None:
    [example] = [block.text for block in blocks("user-code") if block.language == "py"]
    assert (ROOT / "examples" / "redact" / "model.py").read_text().endswith(example)


def check_lmi(words: list[str]) -> None:
    """A word of lmi with flags that it has. Raises click's own error otherwise."""
    command: click.Command = lmi.commands[words[0]]
    if words[0] == "gateway":
        command = gateway

    with suppress(click.exceptions.Exit):  # after its help
        command.make_context(words[0], words[1:])


def check_curl(words: list[str]) -> None:
    servers = ("localhost:8080/", "localhost:8082/", "localhost:8090/", "https://localhost:8080/")
    [url] = [word for word in words if word.startswith(servers)]
    flags = {"-d": 1, "-H": 1, "-X": 1, "--data-binary": 1, "--cacert": 1}

    assert rest_of(words, flags) == [url]


DOCKER_RUN = {
    **dict.fromkeys(("--rm", "--read-only"), 0),
    **dict.fromkeys(
        ("-p", "-v", "-e", "--gpus", "--shm-size", "--user", "--tmpfs", "--cap-drop"), 1
    ),
    **dict.fromkeys(("--security-opt", "--network", "--ipc", "--ulimit", "-w", "--entrypoint"), 1),
}
# The model, this repository
READ = {"/opt/ml/model", "/checkout"}
# HF_HOME and XDG_CACHE_HOME of the image
WRITTEN = {"/tmp/huggingface", "/tmp/cache"}


def check_docker(words: list[str]) -> None:
    if words[0] == "compose":
        check_compose(words[1:])
    elif words[0] == "run":
        image, *command = rest_of(words[1:], DOCKER_RUN)
        check_image(image)
        if "--entrypoint" in words:
            assert command[0] == "-c" and (ROOT / command[1]).is_file()
        elif command:
            check_lmi(command)

        for place in (words[i + 1] for i, word in enumerate(words) if word == "-v"):
            folder, _, mode = place.partition(":")[2].partition(":")
            assert (folder in READ and mode == "ro") or (folder in WRITTEN and not mode), place
    else:
        assert words == ["stop", "-t", "30"]


def check_image(image: str) -> None:
    """The tag is one that `scripts/build-image` gives or a page: lmi, or lmi:TARGET."""
    stages = set(
        re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    )
    name, _, target = image.partition(":")
    assert name == "lmi" and (not target or target in stages), image


def check_compose(words: list[str]) -> None:
    assert words[0] == "-f" and words[2] == "--profile" and words[4:] == ["up", "--build"]
    services = yaml.safe_load((ROOT / words[1]).read_text())["services"]
    assert any(words[3] in service["profiles"] for service in services.values())


MANIFESTS = [
    manifest
    for path in (ROOT / "scripts" / "kubernetes").glob("*.yaml")
    for manifest in yaml.safe_load_all(path.read_text())
]
OBJECTS = {f"{each['kind'].lower()}/{each['metadata']['name']}" for each in MANIFESTS} | {
    "deployment/lmi-demo"
}
LABELS = {"app.kubernetes.io/name=lmi", "leaderworkerset.sigs.k8s.io/name=lmi-nodes"}


def check_kubectl(words: list[str]) -> None:
    if words[:2] == ["apply", "-f"]:
        assert list(yaml.safe_load_all((ROOT / words[2]).read_text()))
    elif words[0] == "create":
        check_created(words)
    elif words[0] == "patch":
        check_patched(words)
    else:
        check_asked(words)


RAY_START = {"--head", "--address", "--port", "--include-dashboard", "--disable-usage-stats"}
# Those that tests/system/test_ray_serve.py runs.
RAY_SERVE = {
    "start": {"--proxy-location", "--http-host", "--http-port"},
    "run": {"--working-dir", "--app-dir"},
}


def check_ray(words: list[str]) -> None:
    """Flags that tests/system/test_vllm_ray.py starts real nodes with."""
    assert words[0] == "start" and {word.partition("=")[0] for word in words[1:]} <= RAY_START


def check_created(words: list[str]) -> None:
    """kubectl itself makes the object without a cluster, and Kubernetes' schema takes it."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")

    nowhere = ["--server", "http://127.0.0.1:9", "--dry-run=client", "-o", "yaml"]
    completed = subprocess.run(
        ["kubectl", *words, *nowhere], capture_output=True, text=True, timeout=RUN_TIMEOUT_S
    )
    assert completed.returncode == 0, completed.stderr
    manifest = yaml.safe_load(completed.stdout)
    manifest.pop("status", None)
    manifest["metadata"].pop("creationTimestamp", None)
    kubernetes_validate.validate(manifest, "1.37", strict=True)


def check_patched(words: list[str]) -> None:
    """tests/scripts/test_kubernetes.py holds what comes out against Kubernetes' schema."""
    verb, kind, name, flag, file = words
    assert (verb, flag) == ("patch", "--patch-file") and f"{kind}/{name}" in OBJECTS
    assert (ROOT / file).is_file()


def check_asked(words: list[str]) -> None:
    """Every object that is named is one of the manifests, every label one that their pods have."""
    flags = {"-l": 1, "--for": 1, "--timeout": 1, "--tail": 1}
    verb, *objects = rest_of(words, flags)

    assert verb in ("get", "wait", "logs", "delete", "rollout", "port-forward"), verb

    if objects[:1] in (["deployment"], ["scaledobject"]):
        objects = ["/".join(objects)]

    for name in (word for word in objects if "/" in word):
        assert name in OBJECTS, name

    assert {words[i + 1] for i, word in enumerate(words) if word == "-l"} <= LABELS


def check_sagemaker(words: list[str]) -> None:
    assert sagemaker([*words, "--dry-run"]) == 0


def check_build_image(words: list[str]) -> None:
    flags = {"--target": 1, "--tag": 1, "--base": 1, "--dry-run": 0}
    assert rest_of(words, flags) == []
    script = (ROOT / "scripts" / "build-image").read_text()
    assert all(f'"{word}"' in script for word in words if word.startswith("--"))
    if "--target" in words:
        check_image(f"lmi:{words[words.index('--target') + 1]}")


def check_install(words: list[str]) -> None:
    match = re.search(r"there are ([\w -]+)", (ROOT / "scripts" / "install").read_text())
    assert match is not None and set(words) <= set(match[1].split())


def check_alone(words: list[str]) -> None:
    assert not words


def check_pip(words: list[str]) -> None:
    locks = "".join(path.read_text() for path in (ROOT / "scripts" / "locks").glob("*.txt"))
    assert words[0] == "install"
    if words[1] == "-r":
        assert (ROOT / words[2]).is_file()
        return

    assert all(f"{name}==" in locks for name in words[1:])


def check_prometheus(words: list[str]) -> None:
    """A configuration that tests/system/test_prometheus.py runs with."""
    [flag] = words
    assert yaml.safe_load((ROOT / flag.removeprefix("--config.file=")).read_text())[
        "scrape_configs"
    ]


def check_export(words: list[str]) -> None:
    assert all(re.fullmatch(r"[A-Za-z_]+=\S+", word) for word in words)


def check_written(words: list[str]) -> None:
    assert words[-2] == ">"


def check_copied(words: list[str]) -> None:
    """It copies a folder of the clone."""
    flag, source, _ = words
    assert flag == "-r" and (ROOT / source).is_dir()


def check_program(words: list[str]) -> None:
    if words[:2] == ["-m", "ray.serve.scripts"]:
        flags = {word for word in words[3:] if word.startswith("--")}
        assert words[2] in RAY_SERVE and flags <= RAY_SERVE[words[2]]
        return

    assert (ROOT / words[0]).is_file()


def check_openssl(words: list[str]) -> None:
    """It makes a certificate that a server can use."""
    subprocess.run(["openssl", *words], check=True, capture_output=True)
    read_certificate("tls.crt", "tls.key")


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "ray": check_ray,
    "lmi": check_lmi,
    "curl": check_curl,
    "docker": check_docker,
    "kubectl": check_kubectl,
    "scripts/sagemaker": check_sagemaker,
    "scripts/build-image": check_build_image,
    "scripts/install": check_install,
    "scripts/serve": lambda words: check_lmi(["serve", *words]),
    "scripts/try-trtllm": check_alone,
    "pip": check_pip,
    "openssl": check_openssl,
    "prometheus": check_prometheus,
    "export": check_export,
    "echo": check_written,
    "printf": check_written,
    "mkdir": lambda words: None,
    "cp": check_copied,
    "python": check_program,
    # tests/clients/test_agents.py runs them with the lines of the page
    "codex": check_alone,
    "claude": check_alone,
    "opencode": check_alone,
}


def rest_of(words: list[str], flags: dict[str, int]) -> list[str]:
    """The words from the first that is neither a flag nor a flag's value; for one-word tools, all
    that are neither.
    """
    words_left = []
    i = 0
    while i < len(words):
        if words[i].startswith("-"):
            i += 1 + flags[words[i]]
        elif "--rm" in flags:
            return words[i:]
        else:
            words_left.append(words[i])
            i += 1

    return words_left


def test_every_block_says_what_it_is() -> None:
    assert {block.language for block in BLOCKS} <= {*SHOWN, "sh", "python", "py"}  # py: a file


# A page is followed from top to bottom.


# Also for pages that start none
SHARED = "lmi serve demo --with-gateway"
OF_THE_CLONE = {folder: f"{ROOT}/{folder}" for folder in ("examples/", "handlers/")}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The ports of a server that runs SHARED, in place of those of the pages, and the folders of a
    clone.
    """
    free: set[int] = set()
    while len(free) < 2:
        free.add(free_port())

    ports = dict(zip(("8080", "8081"), map(str, free), strict=True))
    folder = tmp_path_factory.mktemp("shared")
    with serving(f"{SHARED}={ports['8081']} --port {ports['8080']}", folder):
        yield ports | OF_THE_CLONE


@contextmanager
def serving(command: str, folder: Path) -> Iterator[None]:
    """A server that was started in `folder` and is ready."""
    environ = ENVIRON | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    shell = ["bash", "-euc", f"exec {sys.executable} -P -m {command} --host 127.0.0.1"]
    log = folder / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(shell, cwd=folder, env=environ, stdout=output, stderr=output)

    try:
        num_ports = 1 + ("--with-gateway" in command)
        wait_until(
            lambda: (
                log.read_text().count('"event":"ready"') == num_ports or server.poll() is not None
            ),
            "it is ready",
            START_TIMEOUT_S,
        )
        assert server.poll() is None, log.read_text()
        yield
    finally:
        server.terminate()
        server.wait(60)


@dataclass
class Reader:
    """Somebody who follows a page in an empty folder, with other ports than the page's."""

    folder: Path
    places: dict[str, str]
    servers: ExitStack
    environ: dict[str, str] = field(default_factory=dict)

    def follow(self, page: str) -> int:
        """Run all that can be run, and compare what the page shows. Return how many commands and
        programs ran.
        """
        num_run = 0
        printed = None
        for block in blocks(page):
            if block.language == "text" and printed is not None:
                expect_shown(block.text, printed)

            outputs = [self.do(step) for step in steps_of(block)]
            done = [output for output in outputs if output is not None]
            printed = "".join(done) if done and len(done) == len(outputs) else None
            num_run += len(done)

        return num_run

    def do(self, step: str) -> str | None:
        """What a command or a program prints, or None if it is not for this machine."""
        if step in (SHARED, "lmi serve demo"):
            return ""

        if not is_for_this_machine(step):
            return None

        if step.startswith("export "):
            self.environ |= dict(pair.split("=", 1) for pair in shlex.split(self.here(step))[1:])
            return ""

        if step.startswith("lmi serve "):
            return self.serve(step)

        return self.run(step)

    def serve(self, command: str) -> str:
        """Start a server of the page, at other ports. The next one takes its place."""
        self.servers.close()
        if "--port" not in command:
            command += " --port 8080"

        if command.endswith("--with-gateway"):
            command += "=8081"

        self.places = self.places | {
            port: str(free_port()) for port in re.findall(r"\b80[89]\d\b", command)
        }
        self.servers.enter_context(serving(self.here(command), self.folder))
        return ""

    def run(self, step: str) -> str:
        text = self.here(step)
        for tool, our_tool in TOOLS.items():
            text = re.sub(rf"^{tool}\b", our_tool, text)

        # A program of examples/, with the clients that its makers publish
        if text.startswith("python "):
            text = f"{python_of('current')} {text.removeprefix('python ')}"

        command = [sys.executable, "-c", text] if "\n" in step else ["bash", "-euc", text]
        environ_kept = {
            name: value for name, value in ENVIRON.items() if not name.startswith("AWS_")
        }
        environ = (
            environ_kept
            | {"PYTHONPATH": str(ROOT), "AWS_EC2_METADATA_DISABLED": "true"}
            | self.environ
        )
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
        )
        assert done.returncode == 0, f"{step}: {done.stdout}\n{done.stderr[-3000:]}"
        return done.stdout

    def here(self, text: str) -> str:
        return re.sub("|".join(self.places), lambda match: self.places[match[0]], text)


TOOLS = {
    "lmi": f"{sys.executable} -P -m lmi",
    "scripts/sagemaker": f"{sys.executable} -P -m scripts.sagemaker_kit",
    "curl": "curl --silent --show-error --fail-with-body",
}


RUN = ("lmi serve ", "lmi chat ", "lmi complete ", "lmi config ", "lmi run-batch ", "lmi bench ")
RUN += ("python ", "curl ", "echo ", "printf ", "mkdir ", "cp ", "export ", "openssl ")
# Takes long to start, needs another model: other tests have their servers
ELSEWHERE = (
    "vllm",
    "/v1/embeddings",
)


def steps_of(block: Block) -> list[str]:
    return (
        block.commands
        if block.language == "sh"
        else [block.text]
        if block.language == "python"
        else []
    )


def is_for_this_machine(step: str) -> bool:
    """Programs, files, exports, servers and requests to this machine are."""
    if step.startswith("scripts/sagemaker"):
        return "--endpoint-url" in step

    return "\n" in step or (step.startswith(RUN) and not any(word in step for word in ELSEWHERE))


def expect_shown(shown: str, printed: str) -> None:
    """What the page shows is what came; … stands for anything."""
    pattern = ".*".join(re.escape(piece) for piece in shown.strip().split("…"))
    assert re.fullmatch(pattern, printed.strip(), re.DOTALL), (
        f"the page shows {shown!r}, printed was {printed!r}"
    )


# Nothing for a laptop
REFERENCE = {
    "adding",
    "engines",
    "licences",
    "options",
    "performance",
    "reliability",
    "scale",
    "scope",
}
# tests/handlers/test_library_page.py runs its programs in one process
OF_ANOTHER_TEST = {"library"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", sorted(PAGES.keys() - REFERENCE - OF_ANOTHER_TEST))
def test_a_reader_who_follows_a_page_sees_what_it_shows(
    page: str, places: dict[str, str], tmp_path: Path
) -> None:
    with ExitStack() as servers:
        assert Reader(tmp_path, places, servers).follow(page) > 0


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    text = PAGES[page].read_text()
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        path, _, anchor = link.partition("#")
        target = (PAGES[page].parent / path).resolve() if path else PAGES[page]
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


def rows_of(page: str) -> dict[str, str]:
    """The rows of all tables of two columns that begin with what happens."""
    rows = re.findall(r"^\| (?!what happens)(.+?) \| (.+) \|$", page, re.MULTILINE)
    return dict(rows)


def test_each_promise_of_reliability_has_tests_that_are_there() -> None:
    sources = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    there = {name for source in sources for name in re.findall(r"\bdef (test_\w+)", source)}
    tests = rows_of((ROOT / "tests" / "promises.md").read_text())

    assert list(rows_of(PAGES["reliability"].read_text())) == list(tests)
    for promise, names in tests.items():
        tests_named = re.findall(r"`(test_\w+)`", names)
        assert tests_named, f"no test holds it: {promise}"
        assert set(tests_named) <= there, set(tests_named) - there


def test_each_test_that_a_page_names_is_there() -> None:
    sources = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    there = {name for source in sources for name in re.findall(r"def (test_\w+)", source)}
    for page, path in PAGES.items():
        named = set(re.findall(r"`(test_\w+)`", path.read_text()))
        assert named <= there, (page, named - there)


def anchors_of(path: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}
