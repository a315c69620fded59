"""The embedded engine needs neither torch nor transformers: it imports neither, and runs where
neither is installed.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.handlers.vllm.small_adapters import write_adapter
from tests.tiny_models import tiny_model

ROOT = Path(__file__).resolve().parents[3]
HEAVY = ("torch", "transformers", "xgrammar", "safetensors")
# Every way to a token: greedy, sampled with every rule, log-probs, n, beams, a guide, an adapter,
# drafts, int8.
PLAY = f"""
import sys
from lmi.executor import *
from lmi.settings.config import EngineConfig
from handlers.lmi_dist import Executor
folder, adapter = sys.argv[1:]
ids, end = tuple(range(5, 80)), 2
rules = dict(top_k=40, top_p=0.9, min_p=0.01, typical_p=0.95, repetition_penalty=1.1, presence_penalty=0.5,
             frequency_penalty=0.1, min_tokens=2, no_repeat_ngram_size=3, seed=7)
requests = [
    Request(ids, 8, end_id=end),
    Request(ids, 8, end_id=end, sampling_config=SamplingConfig(temperature=0.8, **rules), embedding_bias=((7, 1.5),),
            bad_words=((9,), (10, 11))),
    Request(ids, 8, sampling_config=SamplingConfig(num_return_sequences=3, temperature=1.0, seed=1)),
    Request(ids, 8, sampling_config=SamplingConfig(3)),
    Request(ids, 8, end_id=end, guided_decoding_params=GuidedDecodingParams(GuideType.REGEX, "[a-z]{3, 5}")),
    Request(ids, 8, output_config=OutputConfig(return_log_probs=True, num_top_log_probs=5, num_prompt_log_probs=2)),
    Request(ids, 8, lora_config=LoraConfig("small")),
    Request(ids, 8, output_config=OutputConfig(return_generation_logits=True)),
]
for config in (EngineConfig(options={{"enable_lora": "true"}}, speculative="ngram"), EngineConfig(quantize="int8")):
    with Executor(folder, config) as executor:
        if config.options:
            executor.load_adapter("small", adapter)
        for request in requests if config.options else requests[:6]:
            request_id = executor.enqueue_request(request)
            responses = []
            while not (responses and responses[-1].is_final):
                responses += executor.await_responses(request_id, timeout_s=60)
            for response in responses:
                assert not response.has_error(), response
print(*sorted(set({HEAVY!r}) & sys.modules.keys()))
"""  # noqa: E501

# A function that a request names gets arrays of numpy where torch is not installed, and must give
# one back.
PROCESS = """
import sys
import numpy as np
from lmi.executor import *
from handlers.lmi_dist import Executor
def force(request_id, logits, *rest):
    assert type(logits) is np.ndarray
    return np.where(np.arange(logits.shape[2]) == 7, 0, -np.inf)[None, None].astype(np.float32)
functions = LogitsPostProcessorConfig({"force": force, "wrong": lambda *rest: [0.5]})
with Executor(sys.argv[1], ExecutorConfig(logits_post_processor_config=functions)) as executor:
    print(executor.capabilities.logits_post_processor_arrays)
    for name in ("force", "wrong"):
        request_id = executor.enqueue_request(Request((1, 2, 3), 2, logits_post_processor_name=name))
        [response] = executor.await_responses(request_id, timeout_s=60)
        print(response.error_msg or response.get_result().output_token_ids[0])
"""  # noqa: E501


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is installed here but HEAVY, and what only they bring."""
    folder = tmp_path_factory.mktemp("packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if (
            not entry.name.startswith((*HEAVY, "vllm", "peft", "accelerate"))
            and entry.suffix != ".pth"
        ):
            (folder / entry.name).symlink_to(entry)

    return folder


def play(*options: str, code: str, arguments: tuple[Path, ...]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_a_clean_interpreter_that_runs_requests_has_imported_neither(tmp_path: Path) -> None:
    done = play(
        code=PLAY, arguments=(tiny_model("llama_wide"), write_adapter(tmp_path / "adapter", seed=1))
    )
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def test_it_runs_where_neither_is_installed(tmp_path: Path, packages: Path) -> None:
    code = f"import sys; sys.path += [{str(ROOT)!r}, {str(packages)!r}]\n{PLAY}"
    done = play(
        "-S",
        code=code,
        arguments=(tiny_model("llama_wide"), write_adapter(tmp_path / "adapter", seed=1)),
    )
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def test_a_post_processor_gets_arrays_of_numpy_where_torch_is_not_installed(packages: Path) -> None:
    code = f"import sys; sys.path += [{str(ROOT)!r}, {str(packages)!r}]\n{PROCESS}"
    done = play("-S", code=code, arguments=(tiny_model("llama"),))
    arrays, forced, wrong = done.stdout.splitlines()
    assert (arrays, forced) == ("numpy", "[7, 7]"), done.stderr
    assert "must be None or an array of shape (1, 1," in wrong


@pytest.mark.parametrize(
    ("family", "config", "says"),
    [
        (
            "olmo2",
            "",
            (
                "Olmo2ForCausalLM runs through the modules of transformers, and torch is not "
                "installed: "
            ),
        ),
        (
            "llama",
            "device='cuda'",
            "option.device=cuda needs torch, which is not installed: scripts/install torch",
        ),
    ],
)
def test_what_needs_torch_and_finds_none_is_one_line_with_the_command(
    family: str, config: str, says: str, packages: Path
) -> None:
    code = (
        f"import sys; sys.path += [{str(ROOT)!r}, {str(packages)!r}]\n"
        "from handlers.lmi_dist import Executor\n"
        "from lmi.settings.config import EngineConfig\n"
        f"try: Executor(sys.argv[1], EngineConfig({config}))\n"
        "except Exception as error: print(error)"
    )
    done = play("-S", code=code, arguments=(tiny_model(family),))
    (line,) = done.stdout.splitlines()
    assert says in line, done.stderr
