"""The real model of the comparison: SmolLM2-135M-Instruct, whose package has it as a GGUF file.

lmi and llama-server take the file as it is. The others, and lmi again, take a Hugging Face folder
with its numbers in bfloat16, which OpenVINO GenAI has exported, and which lmi quantises at load.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from handlers.lmi_dist.native.records import BF16, BITS4, BITS8, INT8
from handlers.lmi_dist.native_runner import BYTES_OF
from lmi.shared.gguf_file import read_model
from lmi.sources.gguf.config import config_of
from scripts.benchmarks.peers import contestants
from scripts.benchmarks.peers.contest import Contestant
from scripts.benchmarks.peers.contestants import ADDRESS, IN_PROCESS, VLLM_ENVIRON
from tests.gguf_files import smollm2_file
from tests.real_model import smollm2

HOME = contestants.MODELS / "smollm2"
VOCAB_SIZE = 49152
# Of a sequence: the longest prompt has 3,000.
MAX_TOKENS = 4096
# llama-server divides its cache among its places.
TOKENS_OF_PLACE = 1024

LMI_BF16 = "lmi bf16"
LMI_INT8 = "lmi int8"
LMI_INT4 = "lmi int4"
LMI_GGUF = "lmi GGUF"
LMI_SERVER = "lmi serve GGUF"
OV_BF16 = "OpenVINO GenAI bf16"
OV_INT8 = "OpenVINO GenAI int8"
OV_INT4 = "OpenVINO GenAI int4"
VLLM_BF16 = "vLLM bf16"
LLAMA_SERVER = "llama-server GGUF"
# With the few places that it has by default.
LLAMA_FEW = "llama-server GGUF, few places"


@dataclass(frozen=True)
class Entrant:
    contestant: Contestant
    # What one token reads of the weights.
    weight_bytes: float
    # The numbers that it multiplies prompts in: a name in limits.cpp.
    products: str

    @property
    def name(self) -> str:
        return self.contestant.name


@dataclass(frozen=True)
class Sizes:
    """How many numbers the linears of the layers and the head have."""

    layers: int
    head: int

    def num_bytes(self, layers: int, head: int) -> float:
        """Return the bytes in these formats of our kernels."""
        return self.layers * BYTES_OF[layers] + self.head * BYTES_OF[head]


def sizes_of(folder: Path) -> Sizes:
    config = json.loads((folder / "config.json").read_text())
    hidden = config["hidden_size"]
    key_width = config["num_key_value_heads"] * config["head_dim"]
    attention = 2 * hidden * hidden + 2 * hidden * key_width
    feed_forward = 3 * hidden * config["intermediate_size"]
    layers = config["num_hidden_layers"] * (attention + feed_forward)
    return Sizes(layers, hidden * config["vocab_size"])


def make_models(peers: set[str]) -> None:
    """Write what is not there yet. The next run finds it."""
    gguf = HOME / "gguf"
    if not (gguf / "config.json").exists():
        gguf.mkdir(parents=True, exist_ok=True)
        (gguf / "model.gguf").unlink(missing_ok=True)
        (gguf / "model.gguf").symlink_to(smollm2_file())
        (gguf / "config.json").write_text(json.dumps(config_of(read_model(smollm2_file()))))

    exports = HOME / "openvino"
    if "openvino" in peers and not (exports / "int4" / "openvino_model.xml").exists():
        module = "scripts.benchmarks.peers.shapes"
        command = [str(contestants.OPENVINO), "-m", module, "openvino", str(smollm2())]
        contestants.make_by(HOME, *command, str(exports), "bf16", "int8", "int4")


def entrants(peers: set[str]) -> Iterator[Entrant]:
    """lmi in each precision, and the peers that are installed."""
    sizes = sizes_of(smollm2())
    in_bfloat16 = sizes.num_bytes(BF16, BF16)
    as_in_file = sizes.num_bytes(BITS4, BITS8)
    yield Entrant(_lmi(LMI_BF16, smollm2()), in_bfloat16, "bfloat16")
    yield Entrant(_lmi(LMI_INT8, smollm2(), "int8"), sizes.num_bytes(INT8, INT8), "int8")
    yield Entrant(_lmi(LMI_INT4, smollm2(), "int4"), sizes.num_bytes(BITS4, INT8), "int16")
    yield Entrant(_lmi(LMI_GGUF, HOME / "gguf"), as_in_file, "int16")
    yield Entrant(_lmi_server(), as_in_file, "int16")
    if "openvino" in peers:
        for name, precision in ((OV_BF16, "bf16"), (OV_INT8, "int8"), (OV_INT4, "int4")):
            folder = HOME / "openvino" / precision
            weights = (folder / "openvino_model.bin").stat().st_size
            products = "bfloat16" if precision == "bf16" else "int8"
            yield Entrant(contestants.openvino(name, folder, {}), weights, products)

    if "vllm" in peers:
        yield Entrant(_vllm(), in_bfloat16, "bfloat16")

    if "llama-cpp" in peers:
        weights = smollm2_file().stat().st_size
        yield Entrant(_llama(LLAMA_SERVER, contestants.NUM_SEQUENCES), weights, "int8")
        yield Entrant(_llama(LLAMA_FEW), weights, "int8")


def _lmi(name: str, model: Path, quantize: str | None = None) -> Contestant:
    settings = {
        "model": str(model),
        "dtype": "auto",
        "quantize": quantize,
        "max_num_sequences": None,
        "max_sequence_length": None,
    }
    return Contestant(name, "lmi", settings)


def _lmi_server() -> Contestant:
    command = [sys.executable, "-m", "lmi", "serve", *ADDRESS, "--set", "log_level=WARNING"]
    command += ["--set", "option.model_name=bench"]
    return contestants.server(LMI_SERVER, [*command, str(smollm2_file())], "/ping")


def _vllm() -> Contestant:
    settings = {"model": str(smollm2()), "dtype": "bfloat16", "max_model_len": MAX_TOKENS}
    environ = VLLM_ENVIRON | IN_PROCESS | contestants.caches(HOME)
    return Contestant(VLLM_BF16, "vllm", settings, environ=environ)


def _llama(name: str, num_places: int | None = None) -> Contestant:
    command = [str(contestants.LLAMA / "llama-server"), "--model", str(smollm2_file()), *ADDRESS]
    command += ["--alias", "bench"]
    if num_places is not None:
        command += ["--parallel", str(num_places)]
        command += ["--ctx-size", str(num_places * TOKENS_OF_PLACE)]

    return contestants.server(name, command, "/health")
