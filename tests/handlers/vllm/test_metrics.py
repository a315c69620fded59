"""The series that lmi shows under vLLM's names, held against those of the installed vLLM."""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType

import pytest
from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric

from lmi.server.metrics import BlockCollector
from lmi.server.twins import PREFIX, TWINS
from lmi.shared.state import Block, Phase
from tests.handlers.vllm.test_arguments import config, engine_config
from tests.server.test_metrics import models_of

pytestmark = pytest.mark.vllm
LORAS = "vllm:lora_requests_info"
# Names that this vLLM no longer has
FORMER = {"vllm:gpu_cache_usage_perc"}
# It comes when an engine has sized its cache, with labels for each of its settings, and these where
# it has adapters or drafts.
LATER = {
    "vllm:cache_config",
    LORAS,
    *(f"vllm:spec_decode_num_{what}" for what in ("drafts", "draft_tokens", "accepted_tokens")),
}


def shape(family: Metric) -> tuple[str, set[str]]:
    """The type, and the names of series with those of their labels."""
    names = {f"{sample.name} {sorted(sample.labels)}" for sample in family.samples}
    return family.type, {name for name in names if "_created " not in name}


def bounds(family: Metric) -> list[str]:
    return list(
        dict.fromkeys(sample.labels["le"] for sample in family.samples if "le" in sample.labels)
    )


def test_each_twin_has_the_type_the_labels_and_the_bounds_that_vllm_gives_it(
    arguments: ModuleType, folder: Path, tmp_path: Path
) -> None:
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    PrometheusStatLogger(engine_config(arguments, config(), folder))
    theirs = {family.name: family for family in REGISTRY.collect()}
    unregister_vllm_metrics()
    block = Block.create(tmp_path / "m", 1, 1)
    block.engines[0].phase = Phase.READY
    block.engines[0].beat_s = time.monotonic()
    collector = BlockCollector(models_of(Block.create(tmp_path / "server", 0, 1), block))
    our_families = {family.name: family for family in collector.collect()}
    twins = {name for name in our_families if name.startswith(PREFIX)}

    assert twins >= {PREFIX + twin.name for twin in TWINS if not twin.name.startswith("http_")}
    assert twins - theirs.keys() == FORMER | LATER

    for name in twins - FORMER - LATER:
        assert shape(our_families[name]) == shape(theirs[name]), name
        # vLLM's end with the context of the model
        if name.endswith("_tokens"):
            assert (
                bounds(our_families[name])[: len(bounds(theirs[name])) - 1]
                == bounds(theirs[name])[:-1]
            ), name
        else:
            assert bounds(our_families[name]) == bounds(theirs[name]), name


def test_adapters_are_shown_with_the_labels_that_vllm_gives_them(
    arguments: ModuleType, folder: Path, tmp_path: Path
) -> None:
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics
    from vllm.v1.metrics.stats import SchedulerStats

    logger = PrometheusStatLogger(
        engine_config(arguments, config({"enable_lora": "true", "max_loras": "2"}), folder)
    )
    stats = SchedulerStats(running_lora_adapters={"a": 1, "b": 2}, waiting_lora_adapters={"c": 1})
    logger.record(stats, None)
    [theirs] = [family for family in REGISTRY.collect() if family.name == LORAS]
    unregister_vllm_metrics()

    block = Block.create(tmp_path / "m", 1, 1)
    engine = block.engines[0]
    engine.max_loras = 2
    engine.running_loras = "a,b"
    engine.waiting_loras = "c"
    collector = BlockCollector(models_of(Block.create(tmp_path / "server", 0, 1), block))
    [our_family] = [family for family in collector.collect() if family.name == LORAS]

    assert our_family.type == theirs.type
    assert [sample.labels for sample in our_family.samples] == [
        sample.labels for sample in theirs.samples
    ]
    assert our_family.samples[0].value == pytest.approx(theirs.samples[0].value, abs=60)
