"""The shared blocks as Prometheus text. What belongs to a model has the label `model`, and ends
when it is unloaded.

Any front end renders the text for all processes from shared memory, so a dead process's totals
stay. Our series come a second time under vLLM's names (`twins.py`).
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple, cast

from prometheus_client import CONTENT_TYPE_LATEST, Metric, ProcessCollector, core, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from lmi import __version__
from lmi.server.field_metrics import FIELD_METRICS, MODEL, FieldMetric
from lmi.server.load_report import kv_cache_usage
from lmi.server.service import Models
from lmi.server.twins import ENGINE, joined_names, twins
from lmi.shared import state
from lmi.shared.records import Counters, CounterView, Histogram, HistogramView, Record
from lmi.shared.state import Block

MEDIA_TYPE = CONTENT_TYPE_LATEST
LORA_LABELS = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")


class RecordGroup(NamedTuple):
    """The records that one sample is about, and the values of its first labels: the model, then
    perhaps the replica.
    """

    labels: list[str]
    records: Sequence[Any]


class Process(NamedTuple):
    """A process with a record, and the labels of its samples. The pid is 0 while there is none."""

    labels: dict[str, str]
    pid: int


class BlockCollector(Collector):
    """The metrics of one front end's models, and of all front ends."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._block = models.front_end.block
        self._blocks = {name: service.block for name, service in models.services.items()}

    def collect(self) -> Iterator[Metric]:
        families = [
            *self._server_families(),
            *self._field_families(),
            *self._engine_families(self._by_model(state.EngineRecord), MODEL),
            self._lora_family(),
            *self._process_families(),
        ]

        yield from families
        yield from twins([*families, *self._replica_families()])

    def _field_families(self) -> Iterator[Metric]:
        for kind, rows in FIELD_METRICS.items():
            for row in rows:
                groups = self._by_model(kind) if row.is_of_model else self._of_server(kind)
                yield _family(kind, row, groups)

    def _of_server(self, kind: type[Record]) -> list[RecordGroup]:
        return [RecordGroup([], records_of(kind, self._block))]

    def _by_model(self, kind: type[Record]) -> list[RecordGroup]:
        groups = []
        for model, block in self._blocks.items():
            groups.append(RecordGroup([model], records_of(kind, block)))

        return groups

    def _replica_families(self) -> Iterator[Metric]:
        """Yield the families of engines again, with a label for each replica, where a model has
        several.
        """
        if all(len(block.engines) <= 1 for block in self._blocks.values()):
            return

        kind = state.EngineRecord
        for row in FIELD_METRICS[kind]:
            groups = self._by_replica(is_gauge=_is_gauge(kind, row))
            model, *counters = row.labels
            labels = (model, ENGINE, *counters)
            yield _family(kind, replace(row, labels=labels), groups)

        groups = self._by_replica(is_gauge=True)
        yield from self._engine_families(groups, (*MODEL, ENGINE))

    def _by_replica(self, *, is_gauge: bool) -> list[RecordGroup]:
        """Return the replicas of each model: for a gauge only those that serve, while any does.

        A reader that takes a server's first series would take a dead replica, which has no load,
        for an idle server.
        """
        groups: list[RecordGroup] = []
        for model, block in self._blocks.items():
            engines = list(enumerate(block.engines))
            serving = [(slot, engine) for slot, engine in engines if engine.is_alive]
            if is_gauge and serving:
                engines = serving

            for slot, engine in engines:
                groups.append(RecordGroup([model, str(slot)], [engine]))

        return groups

    def _server_families(self) -> Iterator[Metric]:
        info = core.InfoMetricFamily("lmi_build", "What runs here", labels=["model", "engine"])
        for name, service in self._models.services.items():
            info.add_metric([name, service.config.engine.handler], {"version": __version__})

        yield info

        num_starts = sum(frontend.num_starts for frontend in self._block.frontends)
        num_restarts = max(0, num_starts - self._models.front_end.config.frontend_workers)
        yield core.CounterMetricFamily(
            "lmi_frontend_restarts", "Front ends started again", value=num_restarts
        )

        blocks = (self._block, *self._blocks.values())
        num_dropped = sum(map(num_log_lines_dropped, blocks))
        yield core.CounterMetricFamily(
            "lmi_log_lines_dropped", "Lines that the log had no room for", value=num_dropped
        )

    def _engine_families(
        self, groups: Iterable[RecordGroup], labels: Sequence[str]
    ) -> Iterator[Metric]:
        """Yield what is made of several fields of engines. `labels` are the names of those of the
        groups.
        """
        ready = core.GaugeMetricFamily(
            "lmi_engines_ready", "Engines that can take requests", labels=labels
        )
        aside = core.GaugeMetricFamily(
            "lmi_engines_set_aside", "Engines that kept dying", labels=labels
        )
        usage = core.GaugeMetricFamily(
            "lmi_kv_cache_usage_ratio", "Share of the KV cache in use", labels=labels
        )
        cache = core.InfoMetricFamily(
            "lmi_kv_cache", "The KV cache of all engines together", labels=labels
        )

        for values, engines in groups:
            num_ready = sum(engine.is_alive for engine in engines)
            num_aside = sum(engine.phase == state.Phase.FAILED for engine in engines)
            ready.add_metric(values, num_ready)
            aside.add_metric(values, num_aside)
            usage.add_metric(values, kv_cache_usage(engines))

            # An engine tells the size of its cache with its first step.
            num_blocks = sum(engine.max_num_blocks for engine in engines)
            if num_blocks:
                block_size = max(engine.tokens_per_block for engine in engines)
                sizes = {"block_size": str(block_size), "num_blocks": str(num_blocks)}
                cache.add_metric(values, sizes)

        yield from (ready, aside, usage, cache)

    def _lora_family(self) -> Metric:
        """Return which adapters run and wait, of each model whose engines have any."""
        labels = (*MODEL, *LORA_LABELS)
        family = core.GaugeMetricFamily(
            "lmi_lora_requests_info", "Adapters that run and wait; the time", labels=labels
        )
        for model, block in self._blocks.items():
            if any(engine.max_loras for engine in block.engines):
                family.add_metric([model, *lora_values(block.engines)], time.time())

        return family

    def _process_families(self) -> Iterator[Metric]:
        """Yield, for each process with a record, what Prometheus' client libraries tell of a
        process.

        Open files are shown only where this front end may count those of all, as one that runs as
        root may: otherwise series would come and go with the front end that a scrape reaches.
        """
        pid = 0
        collector = ProcessCollector(pid=lambda: pid, registry=None)

        families: dict[str, Metric] = {}
        for process in self._processes():
            pid = process.pid
            if not pid:
                continue

            for metric in collector.collect():
                empty_family = Metric(metric.name, metric.documentation, metric.type)
                family = families.setdefault(metric.name, empty_family)
                for sample in metric.samples:
                    family.samples.append(sample._replace(labels=process.labels))

        # A process that has ended, or whose files may not be counted, has no sample.
        num_processes = max((len(family.samples) for family in families.values()), default=0)
        for family in families.values():
            if len(family.samples) == num_processes:
                yield family

    def _processes(self) -> Iterator[Process]:
        supervisor = self._block.supervisor
        yield Process({"process": "supervisor"}, supervisor.pid)

        for slot, front_end in enumerate(self._block.frontends):
            yield Process({"process": f"front {slot}"}, front_end.pid)

        for model, block in self._blocks.items():
            kinds = {"engine": block.engines, "code": block.formatters}
            for kind, records in kinds.items():
                for slot, record in enumerate(records):
                    labels = {"process": f"{kind} {slot}", "model": model}
                    yield Process(labels, record.pid)


def _family(kind: type[Record], row: FieldMetric, groups: Iterable[RecordGroup]) -> Metric:
    """Return the metric of a field, with a sample or several for each group."""
    field = kind.fields[row.field]
    family_class: Any = core.CounterMetricFamily
    if isinstance(field, Histogram):
        family_class = core.HistogramMetricFamily
    elif _is_gauge(kind, row):
        family_class = core.GaugeMetricFamily

    family = family_class(row.name, row.help, labels=row.labels)
    for labels, records in groups:
        values = [getattr(record, row.field) for record in records]
        if isinstance(field, Histogram):
            family.add_metric(labels, *summed(values))
        elif isinstance(field, Counters):
            for counter_name, total in _totals(values).items():
                family.add_metric([*labels, counter_name], total)
        elif row.shows_worst:
            family.add_metric(labels, max(values))
        else:
            family.add_metric(labels, sum(values))

    return cast(Metric, family)


def _is_gauge(kind: type[Record], row: FieldMetric) -> bool:
    return kind.fields[row.field].is_gauge and not row.is_counter


def _totals(views: Iterable[CounterView]) -> dict[str, int]:
    """Return the sums of the counters of several records, by label."""
    totals: dict[str, int] = {}
    for view in views:
        for label, count in view.items():
            totals[label] = totals.get(label, 0) + count

    return totals


def records_of(kind: type[Record], block: Block) -> Sequence[Record]:
    if kind is state.SupervisorRecord:
        return [block.supervisor]

    if kind is state.EngineRecord:
        return block.engines

    return block.frontends


def lora_values(engines: Sequence[state.EngineRecord]) -> list[str]:
    """Return the values of LORA_LABELS for engines together."""
    max_loras = sum(engine.max_loras for engine in engines)
    running = joined_names([engine.running_loras for engine in engines])
    waiting = joined_names([engine.waiting_loras for engine in engines])
    return [str(max_loras), running, waiting]


def num_log_lines_dropped(block: Block) -> int:
    """The lines that all processes with a record and gunicorn's master dropped."""
    records: list[Any] = [block.supervisor, *block.engines, *block.formatters, *block.frontends]
    total: int = sum(record.num_log_lines_dropped for record in records)
    return total + block.supervisor.num_log_lines_dropped_by_master


def summed(views: Sequence[HistogramView]) -> tuple[list[tuple[str, float]], float]:
    """Return the sum of the views: the cumulative buckets of the text format, and the sum of the
    values.
    """
    counts_of_views = [view.counts for view in views]
    counts = map(sum, zip(*counts_of_views, strict=True))
    totals = map(float, accumulate(counts))
    bounds = [*map(floatToGoString, views[0].bounds), "+Inf"]
    buckets = list(zip(bounds, totals, strict=True))
    sum_of_values = sum(view.sum for view in views)
    return buckets, sum_of_values


def render(models: Models) -> bytes:
    """Return the whole text, for one scrape."""
    return generate_latest(BlockCollector(models))
