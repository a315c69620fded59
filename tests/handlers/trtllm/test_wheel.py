"""The real TensorRT-LLM, where there is one: its surface against the facts, and our Executor on a
GPU.

Everywhere else the same checks run on the double, and the one that needs a real model on the
embedded engine.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from lmi.executor import Executor
from tests.handlers.trtllm.double import double
from tests.handlers.trtllm.facts import PROFILES
from tests.handlers.trtllm.wheel_checks import (
    ANSWER_CHECKS,
    config_of_checks,
    greedy_tokens_are_those_of_transformers,
    profile_name,
    small_model,
    surface_checks,
    why_no_gpu,
    why_not_the_package,
)

NO_PACKAGE = why_not_the_package()
IS_REAL = NO_PACKAGE is None
SURFACE = surface_checks(profile_name() if IS_REAL else PROFILES[-1])
# The double's logits are a function of the last tokens, not those of a model.
ON_A_DOUBLE = tuple(
    check for check in ANSWER_CHECKS if check is not greedy_tokens_are_those_of_transformers
)
Check = Callable[[Executor, Path], None]

on_the_package = pytest.mark.skipif(not IS_REAL, reason=NO_PACKAGE or "")
elsewhere = pytest.mark.skipif(IS_REAL, reason="the real package is tested")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return small_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def real(model: Path) -> Iterator[Executor]:
    if (reason := why_no_gpu()) is not None:
        pytest.skip(reason)

    from handlers.lmi_trtllm import Executor

    with Executor(str(model), config_of_checks()) as executor:
        yield executor


@on_the_package
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SURFACE)
def test_the_package_has_what_the_facts_say(name: str) -> None:
    SURFACE[name]()


@on_the_package
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("check", ANSWER_CHECKS, ids=lambda check: check.__name__)
def test_the_package_answers_as_the_contract_says(
    check: Check, real: Executor, model: Path
) -> None:
    check(real, model)


@pytest.fixture(scope="module", params=PROFILES)
def of_double(request: pytest.FixtureRequest, model: Path) -> Iterator[Executor]:
    with (
        double(request.param) as executor_class,
        executor_class(str(model), config_of_checks()) as executor,
    ):
        yield executor


@elsewhere
@pytest.mark.parametrize("check", ON_A_DOUBLE, ids=lambda check: check.__name__)
def test_a_check_of_answers_holds_on_the_double(
    check: Check, of_double: Executor, model: Path
) -> None:
    check(of_double, model)


@elsewhere
@pytest.mark.parametrize("check", ANSWER_CHECKS, ids=lambda check: check.__name__)
def test_a_check_of_answers_holds_on_the_embedded_engine(
    check: Check, embedded: Executor, model: Path
) -> None:
    check(embedded, model)


@pytest.fixture(scope="module")
def embedded(model: Path) -> Iterator[Executor]:
    from handlers.lmi_dist import Executor

    with Executor(str(model), config_of_checks("lmi-dist")) as executor:
        yield executor


@elsewhere
def test_the_tokens_of_another_model_are_not_those_of_transformers(
    embedded: Executor, tmp_path: Path, model: Path
) -> None:
    second_model = shutil.copytree(model, tmp_path / "other")
    weights = load_file(second_model / "model.safetensors")
    # Each token is another one
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].roll(1, 0)
    save_file(weights, second_model / "model.safetensors", {"format": "pt"})
    with pytest.raises(AssertionError, match="leave the best"):
        greedy_tokens_are_those_of_transformers(embedded, second_model)
