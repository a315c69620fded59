import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig
from lmi.shared import linux
from lmi.supervisor.cores import Cores, num_engine_threads, of_threads


def test_engines_get_the_last_cores_and_everything_else_the_first() -> None:
    assert Cores.divide([0, 1], 1, 1, 1) == Cores(((1,),), (0,))
    assert Cores.divide([2, 3, 5, 7, 8, 9], 2, 2, 2) == Cores(((5, 7), (8, 9)), (2, 3))


@pytest.mark.parametrize("num_threads, num_others", [(4, 1), (5, 1), (3, 2)])
def test_cores_are_divided_only_where_each_other_process_gets_one(
    num_threads: int, num_others: int
) -> None:
    assert Cores.divide(range(4), 1, num_threads, num_others) is None


CLAIM = """
import sys
from lmi.supervisor import cores
wanted = cores.Cores(((1,),), (0,)) if sys.argv[2] == "some" else None
print(cores.claimed(wanted, "\\0" + sys.argv[1]) is not None, flush=True)
input()
"""


def test_one_server_of_a_machine_keeps_to_cores_until_it_is_gone() -> None:
    command = [sys.executable, "-c", CLAIM, f"lmi.test.{os.getpid()}", "some"]
    with start([*command[:-1], "none"]) as unbound, start(command) as first:
        assert says(unbound) == "False"
        assert says(first) == "True"

        with start(command) as second:
            assert says(second) == "False"
            second.kill()

        first.kill()
        unbound.kill()

    with start(command) as third:
        assert says(third) == "True"
        third.kill()


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_threads_that_run_and_those_that_they_start_keep_to_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    monkeypatch.setenv(linux.CORES, str(core))
    release = threading.Event()
    affinities = []

    def wait_and_look() -> None:
        release.wait(60)
        affinities.append(os.sched_getaffinity(0))
        with ThreadPoolExecutor(1) as pool:
            affinities.append(pool.submit(os.sched_getaffinity, 0).result())

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(wait_and_look)
        try:
            linux.keep_to_cores()
            release.set()
            running.result(60)
        finally:
            linux.bind_threads(sorted(before))

    assert affinities == [{core}, {core}]


def test_a_process_that_is_told_nothing_keeps_all_its_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(linux.CORES, raising=False)
    before = os.sched_getaffinity(0)
    linux.keep_to_cores()
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.Q4_1.gguf"])
def test_a_small_model_leaves_a_core_to_the_front_end_and_a_big_one_takes_all(
    tmp_path: Path, name: str
) -> None:
    # A folder that is made of a GGUF file has a link to it.
    weights = tmp_path / "weights"
    weights.write_bytes(b"small")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / name).symlink_to(weights)
    assert num_engine_threads(EngineConfig(), str(folder), num_cores=8) == 7

    os.truncate(weights, 65 << 20)
    assert num_engine_threads(EngineConfig(), str(folder), num_cores=8) == 8
    assert num_engine_threads(EngineConfig(num_engines=3), str(folder), num_cores=8) == 2
    assert num_engine_threads(EngineConfig(num_threads=5), str(folder), num_cores=8) == 5
    assert num_engine_threads(EngineConfig(num_engines=3), str(folder), num_cores=1) == 1


def test_weights_that_are_gone_are_for_the_engine_to_tell(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(tmp_path / "gone.gguf")
    assert num_engine_threads(EngineConfig(), str(tmp_path), num_cores=8) == 7


def test_threads_of_kernels_spin_shortly_and_an_operator_may_set_their_number(
    tmp_path: Path,
) -> None:
    def config(num_threads: int | None) -> Config:
        model = ModelConfig(path=str(tmp_path), name="m")
        return Config(
            server=ServerConfig(), model=model, engine=EngineConfig(num_threads=num_threads)
        )

    variables = {
        "GOMP_SPINCOUNT": "1000",
        "OMP_NUM_THREADS": "3",
        linux.THREADS_WHY: "option.num_threads",
    }

    assert of_threads(config(3), {"OMP_NUM_THREADS": "5"}) == variables
    assert of_threads(config(None), {"OMP_NUM_THREADS": "5", "GOMP_SPINCOUNT": "7"}) == {
        "GOMP_SPINCOUNT": "7"
    }
    assert int(of_threads(config(None), {})["OMP_NUM_THREADS"]) >= 1


@pytest.mark.parametrize(
    ("engine", "num_bytes", "why"),
    [
        (EngineConfig(num_threads=1), 1, "option.num_threads"),
        (EngineConfig(num_engines=3), 1, "3 replicas share them"),
        (EngineConfig(), 1, "beside a small model the front end needs one more"),
        (EngineConfig(tensor_parallel_degree=2), 65 << 20, "its ranks share them"),
    ],
)
def test_an_engine_with_fewer_threads_than_cores_knows_why(
    tmp_path: Path, engine: EngineConfig, num_bytes: int, why: str
) -> None:
    (tmp_path / "model.safetensors").touch()
    os.truncate(tmp_path / "model.safetensors", num_bytes)
    config = Config(
        server=ServerConfig(), model=ModelConfig(path=str(tmp_path), name="m"), engine=engine
    )
    assert of_threads(config, {})[linux.THREADS_WHY] == why


def test_the_ranks_of_all_engines_share_the_cores(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    os.truncate(tmp_path / "model.safetensors", 65 << 20)

    assert num_engine_threads(EngineConfig(handler="vllm"), str(tmp_path), num_cores=8) == 8
    assert (
        num_engine_threads(EngineConfig(handler="vllm", num_engines=2), str(tmp_path), num_cores=8)
        == 4
    )
    assert (
        num_engine_threads(
            EngineConfig(handler="vllm", tensor_parallel_degree=4), str(tmp_path), num_cores=8
        )
        == 2
    )


def test_a_small_model_on_two_cores_keeps_its_engine_off_the_core_of_the_front_end(
    tmp_path: Path,
) -> None:
    def config(engine: EngineConfig) -> Config:
        return Config(
            server=ServerConfig(), model=ModelConfig(path=str(tmp_path), name="m"), engine=engine
        )

    small = config(EngineConfig(num_threads=1))
    assert Cores.of(small, {}, [4, 7]) == Cores(((7,),), (4,))
    assert Cores.of(small, {"OMP_NUM_THREADS": "2"}, [4, 7]) == Cores(((7,),), (4,))

    for engine in (
        EngineConfig(num_threads=2),
        EngineConfig(num_threads=1, bind_cores=False),
        EngineConfig(num_threads=1, device_ids=("0",)),
        EngineConfig(num_threads=1, tensor_parallel_degree=2),
        EngineConfig(environ={"OMP_NUM_THREADS": "2"}),
    ):
        assert Cores.of(config(engine), {}, [4, 7]) is None

    assert Cores.of(config(EngineConfig()), {"OMP_NUM_THREADS": "1"}, [4, 7]) is None
    assert Cores.of(small, {}, []) is None
