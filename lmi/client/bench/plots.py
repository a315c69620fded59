"""The plots of a report: what its lines show, before anything is drawn."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from lmi.client.bench.figures import LATENCIES
from lmi.client.bench.load import Sample

# The points of a line of latencies.
NUM_STEPS = 200
# The bins of time of all rounds, and the least of each.
NUM_BINS = 40
MIN_BINS = 4
# The places of the rules of a grid, as shares of the largest value.
GRID = (0.0, 0.25, 0.5, 0.75, 1.0)
# The points of a line, each with its place from left to right and its height.
Line = list[tuple[float, float]]


class Plot(NamedTuple):
    """A plot with a line for each server."""

    title: str
    # The unit of what goes from left to right.
    unit: str
    # One line for each server.
    lines: list[Line]

    def area(self, left_x: float, top_y: float, width: float, height: float) -> "Area":
        """Return the area of this size on which its lines fit."""
        max_x = 0.0
        max_y = 0.0
        for line in self.lines:
            for x, y in line:
                max_x = max(max_x, x)
                max_y = max(max_y, y)

        return Area(left_x, top_y, width, height, max_x or 1.0, max_y or 1.0)


class Area(NamedTuple):
    """Where the lines of a plot are drawn: from 0 to the largest value in both directions."""

    # The upper left corner.
    left_x: float
    top_y: float
    width: float
    height: float
    # The largest values, more than 0.
    max_x: float
    max_y: float

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Return where a point of a line is drawn."""
        across = x / self.max_x * self.width
        down = (1 - y / self.max_y) * self.height
        return self.left_x + across, self.top_y + down


def plots_of(report: dict[str, Any]) -> list[Plot]:
    """Return a plot of each latency, and one of the rate over time."""
    servers = report["servers"]
    plots = []
    for name, label in LATENCIES.items():
        shares = [_shares(server, name) for server in servers]
        plots.append(Plot(f"{label.capitalize()}: share within", "ms", shares))

    rates = [_rates(server) for server in servers]
    plots.append(Plot("Output tokens per second, over time", "s", rates))
    return plots


def _shares(server: dict[str, Any], name: str) -> Line:
    """Return the distribution of latencies of whole answers: a value in ms, and the share of all up
    to it.
    """
    values_ms = []
    for samples in server["samples"]:
        for sample in samples:
            if sample.is_ok:
                values_ms += [value * 1e3 for value in sample.latencies_s[name]]

    if not values_ms:
        return []

    values_ms.sort()
    num_values = len(values_ms)
    # Of many values, NUM_STEPS at equal distances.
    ranks = {round(step * num_values / NUM_STEPS) for step in range(1, NUM_STEPS + 1)}
    line = [(0.0, 0.0)]
    for rank in sorted(ranks - {0}):
        line.append((values_ms[rank - 1], rank / num_values))

    return line


def _rates(server: dict[str, Any]) -> Line:
    """Return tokens per second over the time of the rounds, one after another.

    Tokens count when they come, and those of an answer that is not streamed at its end.
    """
    points: Line = []
    passed_s = 0.0
    num_bins = max(MIN_BINS, NUM_BINS // len(server["samples"]))
    for samples in server["samples"]:
        start_s = min(sample.due_s for sample in samples)
        until_s = max(sample.end_s for sample in samples)
        bin_s = max(until_s - start_s, 1e-9) / num_bins

        for number, num_tokens in enumerate(_binned(samples, start_s, bin_s, num_bins)):
            middle_s = passed_s + (number + 0.5) * bin_s
            points.append((middle_s, num_tokens / bin_s))

        passed_s += until_s - start_s

    return points


def _binned(samples: Sequence[Sample], start_s: float, bin_s: float, num_bins: int) -> list[float]:
    """Return the tokens that came in each bin of time."""
    bins = [0.0] * num_bins
    for sample in samples:
        times_s = sample.times_s or [sample.end_s]
        num_tokens_each = sample.num_tokens / len(times_s)
        for time_s in times_s:
            number = int((time_s - start_s) / bin_s)
            bins[min(num_bins - 1, number)] += num_tokens_each

    return bins


def short(value: float) -> str:
    """Return a value with three digits, or as a whole number if it has more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
