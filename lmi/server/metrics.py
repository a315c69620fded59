"""The shared blocks as Prometheus text. What belongs to a model has the label `model`, and ends when it is unloaded.

Any front end renders the text for all processes from shared memory, so a dead process's totals stay. The fields of the
records say how they are shown; what is made of several fields stands here.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, cast

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from lmi import __version__
from lmi.server.metric_twins import twins
from lmi.server.models import Models
from lmi.shared import state
from lmi.shared.state import Block, Record

MEDIA_TYPE = CONTENT_TYPE_LATEST
FAMILIES: dict[type[state.Metric], type[Any]] = {
    state.Counter: CounterMetricFamily,
    state.Gauge: GaugeMetricFamily,
    state.Metric: HistogramMetricFamily,
}


class BlockCollector(Collector):
    """The metrics of one front end's models, and of all front ends."""

    def __init__(self, models: Models) -> None:
        self._models, self._block = models, models.front_end.block
        self._of_models = {name: service.block for name, service in models.services.items()}

    def collect(self) -> Iterator[Metric]:
        families = list(self._families())
        yield from families
        yield from twins(families)

    def _families(self) -> Iterator[Metric]:
        yield from self._of_server()
        for kind in (state.FrontEndRecord, state.EngineRecord, state.SupervisorRecord):
            for name, field in kind.fields.items():
                if field.metric is not None:
                    yield self._family(kind, name, field, field.metric)
        yield from self._of_engines()
        yield from self._of_processes()

    def _of_server(self) -> Iterator[Metric]:
        info = InfoMetricFamily("lmi_build", "What runs here", labels=["model", "engine"])
        for name, service in self._models.services.items():
            info.add_metric([name, service.config.engine.handler], {"version": __version__})
        yield info
        num_starts = sum(frontend.num_starts for frontend in self._block.frontends)
        num_again = max(0, num_starts - self._models.front_end.config.frontend_workers)
        yield CounterMetricFamily("lmi_frontend_restarts", "Front ends started again", value=num_again)
        num_dropped = sum(block.num_log_lines_dropped for block in (self._block, *self._of_models.values()))
        yield CounterMetricFamily("lmi_log_lines_dropped", "Lines that the log had no room for", value=num_dropped)

    def _of_engines(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily("lmi_engines_ready", "Engines that can take requests", labels=state.MODEL)
        aside = GaugeMetricFamily("lmi_engines_set_aside", "Engines that kept dying", labels=state.MODEL)
        usage = GaugeMetricFamily("lmi_kv_cache_usage_ratio", "Share of the KV cache in use", labels=state.MODEL)
        cache = InfoMetricFamily("lmi_kv_cache", "The KV cache of all engines together", labels=state.MODEL)
        for model, block in self._of_models.items():
            ready.add_metric([model], sum(engine.is_alive for engine in block.engines))
            aside.add_metric([model], sum(engine.phase == state.Phase.FAILED for engine in block.engines))
            used, whole = (sum(e.num_used_blocks for e in block.engines), sum(e.max_num_blocks for e in block.engines))
            usage.add_metric([model], used / whole if whole else 0.0)
            if whole:  # an engine tells it with its first step
                block_size = max(engine.tokens_per_block for engine in block.engines)
                cache.add_metric([model], {"block_size": str(block_size), "num_blocks": str(whole)})
        yield from (ready, aside, usage, cache)

    def _of_processes(self) -> Iterator[Metric]:
        """Yield what Prometheus' clients say of their process, of each process with a record.

        Open files are shown only where this front end may count those of all, as one that runs as root may: otherwise
        series would come and go with the front end that a scrape reaches.
        """
        processes = [(labels, record.pid) for labels, record in self._processes() if record.pid]
        collector = ProcessCollector(pid=partial(next, iter([pid for _, pid in processes])), registry=None)
        families: dict[str, Metric] = {}
        for labels, _ in processes:
            for found in collector.collect():
                family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
                family.samples += [sample._replace(labels=labels) for sample in found.samples]
        num_alive = max((len(family.samples) for family in families.values()), default=0)
        yield from (family for family in families.values() if len(family.samples) == num_alive)

    def _processes(self) -> Iterator[tuple[dict[str, str], Record]]:
        yield {"process": "supervisor"}, self._block.supervisor
        for slot, front_end in enumerate(self._block.frontends):
            yield {"process": f"front {slot}"}, front_end
        for model, block in self._of_models.items():
            for name, records in (("engine", block.engines), ("code", block.formatters)):
                for slot, record in enumerate(records):
                    yield {"process": f"{name} {slot}", "model": model}, record

    def _family(self, kind: type[Record], name: str, field: state.Field, metric: state.Metric) -> Metric:
        """Return the samples of a field: of the server, or of each model."""
        family: Any = FAMILIES[type(metric)](metric.name, metric.text, labels=metric.labels)
        blocks = [([model], block) for model, block in self._of_models.items()]
        for labels, block in blocks if "model" in metric.labels else [(list[str](), self._block)]:
            values = [getattr(record, name) for record in records_of(kind, block)]
            if isinstance(field, state.Histogram):
                family.add_metric(labels, *summed(values))
            elif isinstance(field, state.Counters):
                for counts in zip(*(view.items() for view in values), strict=True):
                    family.add_metric([*labels, counts[0][0]], sum(count for _, count in counts))
            else:
                is_worst = isinstance(metric, state.Gauge) and metric.is_worst
                family.add_metric(labels, max(values) if is_worst else sum(values))
        return cast(Metric, family)


def records_of(kind: type[Record], block: Block) -> Sequence[Record]:
    if kind is state.SupervisorRecord:
        return [block.supervisor]
    return block.engines if kind is state.EngineRecord else block.frontends


def summed(views: Sequence[state.HistogramView]) -> tuple[list[tuple[str, float]], float]:
    """Return the sum of the views: the cumulative buckets of the text format, and the sum of the values."""
    totals = accumulate(map(sum, zip(*(view.counts for view in views), strict=True)))
    bounds = [*map(floatToGoString, views[0].bounds), "+Inf"]
    return list(zip(bounds, map(float, totals), strict=True)), sum(view.sum for view in views)


def render(models: Models) -> bytes:
    """Return the whole text, for one scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(BlockCollector(models))
    return generate_latest(registry)
