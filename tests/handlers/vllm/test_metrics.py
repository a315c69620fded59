"""The series that lmi shows under vLLM's names, held against those of the installed vLLM."""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType

import pytest
from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric

from lmi.server.metrics import PREFIX, TWINS, BlockCollector
from lmi.shared.state import Block, Phase
from tests.handlers.vllm.test_arguments import config, engine_config
from tests.server.test_metrics import models_of

pytestmark = pytest.mark.vllm
FORMER = {"vllm:gpu_cache_usage_perc"}  # names that this vLLM no longer has
# It comes when an engine has sized its cache, with labels for each of its settings, and these where it drafts.
LATER = {
    "vllm:cache_config",
    *(f"vllm:spec_decode_num_{what}" for what in ("drafts", "draft_tokens", "accepted_tokens")),
}


def shape(family: Metric) -> tuple[str, set[str]]:
    """The type, and the names of series with those of their labels."""
    names = {f"{sample.name} {sorted(sample.labels)}" for sample in family.samples}
    return family.type, {name for name in names if "_created " not in name}


def bounds(family: Metric) -> list[str]:
    return list(dict.fromkeys(sample.labels["le"] for sample in family.samples if "le" in sample.labels))


def test_each_twin_has_the_type_the_labels_and_the_bounds_that_vllm_gives_it(
    arguments: ModuleType, folder: Path, tmp_path: Path
) -> None:
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    PrometheusStatLogger(engine_config(arguments, config(), folder))
    theirs = {family.name: family for family in REGISTRY.collect()}
    unregister_vllm_metrics()
    block = Block.create(tmp_path / "m", 1, 1)
    block.engines[0].phase, block.engines[0].beat_s = Phase.READY, time.monotonic()
    collector = BlockCollector(models_of(Block.create(tmp_path / "server", 0, 1), block))
    ours = {family.name: family for family in collector.collect()}
    twins = {name for name in ours if name.startswith(PREFIX)}
    assert twins >= {PREFIX + twin.name for twin in TWINS if not twin.name.startswith("http_")}
    assert twins - theirs.keys() == FORMER | LATER
    for name in twins - FORMER - LATER:
        assert shape(ours[name]) == shape(theirs[name]), name
        if name.endswith("_tokens"):  # vLLM's end with the context of the model
            assert bounds(ours[name])[: len(bounds(theirs[name])) - 1] == bounds(theirs[name])[:-1], name
        else:
            assert bounds(ours[name]) == bounds(theirs[name]), name
