"""`scripts/bench peers`: who takes part, what counts, and what the report says of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.benchmarks.peers import contestants, limits, real_report, report
from scripts.benchmarks.peers.contest import Contestant, Figure, Worker, play, workers
from scripts.benchmarks.peers.real import LLAMA_SERVER, LMI_INT8, LMI_SERVER, OV_INT8, Entrant
from scripts.benchmarks.peers.results import Results, add, load
from scripts.benchmarks.peers.shapes import SHAPES, Shape, new_name
from scripts.benchmarks.peers.worker import Burst, Outcome, Start
from tests.scripts.kernels import ROOT

BURST = Burst(num_streams=3, num_prompt=20, num_new=4, vocab_size=4096, seed=7)
TINY = Shape("llama", 512, 32, 64, 2, 4, 2, num_new=4)


def outcome(speed: float, waited: float = 0.0) -> Outcome:
    return Outcome(num_tokens=100, seconds=100 / speed, first_s=[0.5, 1.0, 1.5], waited=waited)


def figure(*speeds: float) -> Figure:
    return Figure(tuple(map(outcome, speeds)))


def test_every_contestant_gets_the_same_prompts_and_each_burst_others() -> None:
    assert BURST.prompts() == BURST.prompts() != replace(BURST, seed=8).prompts()
    assert [len(prompt) for prompt in BURST.prompts()] == [20] * 3
    assert len({tuple(prompt) for prompt in BURST.prompts()}) == 3


def test_prompts_that_share_a_start_differ_after_it() -> None:
    prompts = replace(BURST, num_shared=15).prompts()
    assert len({tuple(prompt[:15]) for prompt in prompts}) == 1
    assert len({tuple(prompt[15:]) for prompt in prompts}) == 3


def test_only_quiet_bursts_count_and_where_none_was_the_one_that_waited_least() -> None:
    mixed = Figure((outcome(10, 0.5), outcome(30), outcome(50)))
    assert mixed.is_quiet and mixed.tokens_per_s == pytest.approx(40)

    loud = Figure((outcome(10, 0.5), outcome(30, 0.2)))
    assert not loud.is_quiet and loud.tokens_per_s == pytest.approx(30)
    assert loud.first_ms == 1000


def test_workers_take_turns_and_one_that_cannot_start_is_left_out(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    from scripts.benchmarks.peers.shapes import make

    make(TINY, tmp_path)
    good = {"model": str(tmp_path / "f32"), "dtype": "fp32"}
    entrants = [
        Contestant("lmi", "lmi", good),
        Contestant("nobody", "lmi", {"model": "/nowhere", "dtype": "fp32"}),
    ]
    with workers(entrants, tmp_path / "log") as ready:
        burst = replace(BURST, vocab_size=TINY.vocab_size)
        figures_of = play(ready, burst, 1, time.monotonic() + 60)
        processes = [worker.process for worker in ready]

    assert list(figures_of) == ["lmi"]
    assert {outcome.num_tokens for outcome in figures_of["lmi"].outcomes} == {12}
    assert {len(outcome.first_s) for outcome in figures_of["lmi"].outcomes} == {3}
    assert "left out: nobody ended" in capfd.readouterr().err
    assert all(process.poll() == 0 for process in processes)


def test_a_contestant_that_fails_in_a_burst_leaves_and_the_others_go_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from scripts.benchmarks.peers.shapes import make

    contestants = []
    # A token over its vocabulary ends the small one
    for name, vocab_size in (
        ("large", 512),
        ("small", 310),
    ):
        make(replace(TINY, vocab_size=vocab_size), tmp_path / name)
        contestants.append(
            Contestant(name, "lmi", {"model": str(tmp_path / name / "f32"), "dtype": "fp32"})
        )

    with workers(contestants, tmp_path / "log") as ready:
        easy = replace(BURST, vocab_size=310)
        hard = replace(BURST, vocab_size=512)
        rounds = [play(ready, burst, 1, time.monotonic() + 60) for burst in (easy, hard, easy)]
        processes = [worker.process for worker in ready]

    assert [sorted(figures) for figures in rounds] == [["large", "small"], ["large"], ["large"]]

    [line] = [line for line in capfd.readouterr().err.splitlines() if line.startswith("left")]
    assert line == "left: small ended with 1 in a burst of 3 prompts of 20 tokens"
    assert [process.poll() for process in processes] == [0, 1]


def test_a_contestant_that_takes_too_long_is_ended() -> None:
    command = [sys.executable, "-c", "import sys; sys.stdin.readline(); sys.stdin.readline()"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        worker = Worker(Contestant("slow", "lmi", {}), process, limit_s=0.5)
        assert play([worker], BURST, 1, time.monotonic() + 60) == {} and not worker.is_in


def results() -> Results:
    results_of_lmi = Results(first={"lmi": figure(10), "OpenVINO GenAI": figure(10)})
    results_of_lmi.speeds[("float32", 1, 32)] = {
        "lmi": figure(150),
        "OpenVINO GenAI": figure(100),
        "vLLM": figure(120),
    }

    results_of_lmi.prefix["cold"] = {
        "lmi": figure(100),
        "vLLM": figure(200),
        "OpenVINO GenAI": figure(50),
    }
    results_of_lmi.starts = {"lmi serve": Start(0.5, 120.0), "vllm serve": Start(25.0, 1200.0)}
    return results_of_lmi


def test_stored_results_are_read_back_and_a_later_run_replaces_only_its_shapes(
    tmp_path: Path,
) -> None:
    file = tmp_path / "peers" / "results.json"
    assert load(file) == {}

    add(file, "5M", results())
    add(file, "135M", Results(first={"lmi": figure(7)}))

    assert load(file) == {"5M": results(), "135M": Results(first={"lmi": figure(7)})}

    add(file, "135M", Results())
    assert load(file) == {"5M": results(), "135M": Results()}
    assert report.ratios_table(load(file)) == report.ratios_table({"5M": results()})


def test_a_ratio_stands_beside_a_goal_that_it_misses() -> None:
    results_of = {"5M": results()}
    assert report.ratios(results_of) == pytest.approx(
        {"5M float32 / OpenVINO GenAI 1x32": 1.5, "5M float32 / vLLM 1x32": 1.25}
    )

    lines = report.ratios_table(results_of).splitlines()
    assert lines[2:] == [
        "| OpenVINO GenAI, 5M, float32 | 1.50 |  |  |  |  |  |  |  |",
        "| vLLM, 5M, float32 | 1.25 (≥ 1.3) |  |  |  |  |  |  |  |",
    ]

    times, goals = report.time_ratios(results_of)
    assert list(times.values()) == pytest.approx([1.0, 2.0, 0.02, 0.1])
    assert [(relation, goal) for *_, relation, goal in goals] == [
        ("<=", 1.0),
        ("<=", 0.8),
        ("<=", 1.0),
        ("<=", 1.0),
    ]


def test_tables_say_what_was_not_quiet_and_leave_empty_what_was_not_measured() -> None:
    results_of_lmi = results()
    results_of_lmi.speeds[("float32", 1, 32)]["vLLM"] = Figure((outcome(120, 0.9),))
    results_of_lmi.first["llama-server"] = figure(5)
    text = report.shape_table("5M", SHAPES["5M"], results_of_lmi)

    assert "| 1 at once, prompts of 32 | 150 | 100 | ~120 |" in text
    assert "| 32 that share 400 tokens, cold, s | 1.00 | 2.00 |  |" in text
    assert (
        "| from exec to 200, s | 0.50 | 25.00 |\n| idle, PSS of all processes, MB | 120 | 1200 |"
        in text
    )
    assert (
        json.loads(report.as_json({"5M": results_of_lmi}, {}))["tokens_per_s"]["5M"][
            "float32 1 32"
        ]["lmi"]
        == 150
    )


def results_of_the_real_model() -> Results:
    results = Results(limits={"read": 40.0}, starts={LMI_INT8: Start(0.9, 340.0)})
    results.speeds[real_report.ONE.key] = {
        LMI_INT8: figure(180),
        OV_INT8: figure(120),
        LMI_SERVER: figure(90),
        LLAMA_SERVER: figure(100),
    }
    results.speeds[real_report.FIRST.key] = {LMI_INT8: figure(2), LLAMA_SERVER: figure(1)}
    return results


def test_a_precision_of_the_real_model_is_compared_with_the_same_one_of_a_peer() -> None:
    lines = real_report.ratios_table(results_of_the_real_model()).splitlines()
    assert lines == [
        "| lmi over | 1 × 32 | first of 900 |",
        "|---|---|---|",
        "| OpenVINO GenAI, int8 | 1.50 |  |",
        "| llama-server, the GGUF file | 0.90 |  |",
    ]


def test_a_stream_has_a_share_of_what_memory_allows() -> None:
    results = results_of_the_real_model()
    entrant = Entrant(Contestant(LMI_INT8, "lmi", {}), 1e8, "int8")
    # 100 of its tokens come in the 2 s behind the first
    slow = Outcome(num_tokens=101, seconds=2.5, first_s=[0.5], waited=0.0)
    results.speeds[real_report.ONE.key] = {LMI_INT8: Figure((slow,))}

    # 50 tokens/s of 100 MB are 5 of 40 GB/s
    assert real_report.share_of_memory(results, entrant) == pytest.approx(0.125)
    assert real_report.share_of_products(results, entrant) is None
    assert f"| {LMI_INT8} | 100 | 50 | 0.12 |  | 0.90 | 340 |" in real_report.shares_table(
        results, [entrant]
    )
    figures = real_report.figures_of(results, [entrant])
    assert [goal.bound for goal in real_report.goals_of(figures)] == [0.8]


def test_the_higher_of_two_measured_limits_counts() -> None:
    assert limits.highest({"read": 30.0}, {"read": 20.0, "int8": 900.0}) == {
        "read": 30.0,
        "int8": 900.0,
    }


def test_no_burst_of_a_large_model_takes_minutes() -> None:
    for name in SHAPES:
        assert all(
            n * prompt <= report.MAX_PREFILL[name] for n, prompt in report.cases(name, False)
        )

    assert (64, 512) in report.cases("135M", False) and (64, 512) not in report.cases("0.5B", False)


def test_only_what_is_installed_takes_part() -> None:
    names = [contestant.name for contestant in contestants.libraries(Path("folder"), {"openvino"})]
    assert names == ["lmi", "OpenVINO GenAI"]
    everyone = [
        contestant.name
        for contestant in contestants.reduced(ROOT / "build", {"openvino", "llama-cpp"})
    ]
    assert everyone == ["lmi int8", "lmi bf16", "OpenVINO GenAI int8", "llama-server Q8_0"]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("model.layers.12.self_attn.q_proj.bias", "blk.12.attn_q.bias"),
        ("model.layers.0.post_attention_layernorm.weight", "blk.0.ffn_norm.weight"),
    ],
)
def test_tensors_get_the_names_of_llama_cpp(ours: str, theirs: str) -> None:
    assert new_name(ours) == theirs


def test_an_unknown_shape_is_refused_by_name() -> None:
    command = [sys.executable, "-m", "scripts.benchmarks.peers.report", "--shapes", "5M,7B"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--shapes must be of 5M, 135M, 0.5B, given 7B" in done.stderr


def test_each_peer_has_a_lock_without_torch_and_without_places() -> None:
    locks = ROOT / "scripts" / "locks" / "peers"
    assert {path.stem for path in locks.iterdir()} == {"llama-cpp", "llama-cpp-source", "openvino"}
    for path in locks.iterdir():
        for line in path.read_text().splitlines():
            assert re.fullmatch(r"[\w.-]+==[\w.+]+( --hash=sha256:[0-9a-f]{64})+", line), line
            assert not line.startswith(("torch", "nvidia", "triton"))
