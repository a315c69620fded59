"""Who takes part: lmi, and the peers that are installed, each as it is by default."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from scripts.benchmarks.peers.contest import ROOT, Contestant, say
from scripts.benchmarks.peers.shapes import MAX_TOKENS, Shape
from scripts.benchmarks.peers.worker import PORT

VENVS = ROOT / ".venv-peers"
MODELS = ROOT / "build" / "peers"
OPENVINO = VENVS / "openvino" / "bin" / "python"
LLAMA = VENVS / "llama-cpp" / "bin"
NUM_SEQUENCES = 64
# Where each server listens.
ADDRESS = ("--host", "127.0.0.1", "--port", PORT)

LMI = "lmi"
OV = "OpenVINO GenAI"
VLLM = "vLLM"
LLAMA_SERVER = "llama-server"
LMI_INT8 = "lmi int8"
LMI_BF16 = "lmi bf16"
OV_INT8 = "OpenVINO GenAI int8"
VLLM_BF16 = "vLLM bf16"
LLAMA_Q8 = "llama-server Q8_0"
LMI_SERVER = "lmi serve"
VLLM_SERVER = "vllm serve"

# In its own process vLLM leaves a core to the server's front end, and there is none. By default it
# takes nine tenths of the memory for its cache.
VLLM_ENVIRON = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def installed() -> set[str]:
    """Return the peers that are installed, and write a line for each that is not."""
    is_installed = {
        "openvino": OPENVINO.exists(),
        "llama-cpp": (LLAMA / "llama-server").exists(),
        "vllm": importlib.util.find_spec("vllm") is not None,
    }
    for name in is_installed:
        if not is_installed[name]:
            say(f"left out: {name} is not installed (scripts/install-peers, scripts/install vllm)")

    return {name for name in is_installed if is_installed[name]}


def make_models(name: str, shape: Shape, peers: set[str]) -> Path:
    """Write what is not there yet. The next run finds it."""
    folder = MODELS / name
    module = "scripts.benchmarks.peers.shapes"
    files = str(folder / "f32")
    if not (folder / "bf16" / "tokenizer_config.json").exists():
        make_by(folder, sys.executable, "-m", module, name, str(folder))

    if "openvino" in peers and not (folder / "openvino" / "int8" / "openvino_model.xml").exists():
        exports = str(folder / "openvino")
        make_by(folder, str(OPENVINO), "-m", module, "openvino", files, exports, "f32", "int8")

    reduced_file = folder / "q8.gguf"
    if "llama-cpp" in peers and not reduced_file.exists():
        whole_file = str(folder / "f32.gguf")
        make_by(folder, str(LLAMA / "python"), "-m", module, "llama-cpp", files, whole_file)
        make_by(folder, str(LLAMA / "llama-quantize"), whole_file, str(reduced_file), "Q8_0")

    return folder


def make_by(folder: Path, *command: str) -> None:
    """Let a command write what a folder lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    say(f"models: {' '.join(Path(word).name for word in command[:4])}")
    environ = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    with (folder / "making.log").open("ab") as log:
        subprocess.run(command, env=environ, stdout=log, stderr=log, check=True)


def libraries(folder: Path, peers: set[str]) -> Iterator[Contestant]:
    """Engines without a server, in float32. llama.cpp is there as its server, which batches; its
    library does not.
    """
    yield Contestant(LMI, "lmi", {"model": str(folder / "f32"), "dtype": "fp32"})
    if "openvino" in peers:
        exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        yield openvino(OV, folder / "openvino" / "f32", exact)

    if "vllm" in peers:
        yield _vllm(VLLM, folder, "f32", "float32")

    if "llama-cpp" in peers:
        yield _llama(LLAMA_SERVER, folder / "f32.gguf")


def reduced(folder: Path, peers: set[str]) -> Iterator[Contestant]:
    """The same in lower precision: each peer's fastest."""
    yield Contestant(
        LMI_INT8, "lmi", {"model": str(folder / "bf16"), "dtype": "auto", "quantize": "int8"}
    )
    yield Contestant(LMI_BF16, "lmi", {"model": str(folder / "bf16"), "dtype": "auto"})
    if "openvino" in peers:
        yield openvino(OV_INT8, folder / "openvino" / "int8", {})

    if "vllm" in peers:
        yield _vllm(VLLM_BF16, folder, "bf16", "bfloat16")

    if "llama-cpp" in peers:
        yield _llama(LLAMA_Q8, folder / "q8.gguf")


def serving(folder: Path, peers: set[str]) -> Iterator[Contestant]:
    """Servers in float32, with their own choice of threads."""
    model = str(folder / "f32")
    yield _lmi_server(model)
    if "vllm" in peers:
        yield _vllm_server(model, VLLM_ENVIRON | caches(folder))

    if "llama-cpp" in peers:
        yield _llama(LLAMA_SERVER, folder / "f32.gguf")


def _lmi_server(model: str) -> Contestant:
    command = [sys.executable, "-m", "lmi", "serve", *ADDRESS]
    for setting in (
        "log_level=WARNING",
        "option.rolling_batch=lmi-dist",
        "option.model_name=bench",
        f"option.max_rolling_batch_size={NUM_SEQUENCES}",
        f"option.max_model_len={MAX_TOKENS}",
        "option.dtype=fp32",
    ):
        command += ["--set", setting]

    return server(LMI_SERVER, [*command, model], "/ping")


def _vllm_server(model: str, environ: dict[str, str]) -> Contestant:
    command = [sys.executable, "-m", "scripts.benchmarks.vllm_serve", "serve", model, *ADDRESS]
    command += ["--served-model-name", "bench", "--dtype", "float32"]
    command += ["--max-model-len", str(MAX_TOKENS)]
    return server(VLLM_SERVER, command, "/health", environ)


def _llama(name: str, model: Path) -> Contestant:
    """Without places for all streams, most would wait for one of four."""
    command = [str(LLAMA / "llama-server"), "--model", str(model), *ADDRESS]
    command += ["--parallel", str(NUM_SEQUENCES)]
    command += ["--ctx-size", str(NUM_SEQUENCES * MAX_TOKENS)]
    command += ["--alias", "bench"]
    return server(name, command, "/health")


def server(
    name: str, command: list[str], health: str, environ: dict[str, str] | None = None
) -> Contestant:
    settings = {"command": command, "health": health, "environ": environ or {}}
    return Contestant(name, "server", settings)


def openvino(name: str, model: Path, properties: dict[str, str]) -> Contestant:
    settings = {"model": str(model), "properties": properties}
    return Contestant(name, "openvino", settings, python=str(OPENVINO))


def _vllm(name: str, folder: Path, precision: str, dtype: str) -> Contestant:
    settings = {"model": str(folder / precision), "dtype": dtype}
    environ = VLLM_ENVIRON | IN_PROCESS | caches(folder)
    return Contestant(name, "vllm", settings, environ=environ)


def caches(folder: Path) -> dict[str, str]:
    """Compiled kernels are kept between runs."""
    caches_folder = folder / "caches"
    caches_folder.mkdir(exist_ok=True)
    return {"XDG_CACHE_HOME": str(caches_folder), "TMPDIR": str(caches_folder)}
