"""Draws lines over a number of streams as a PNG, with Pillow, which comes with vLLM.

The picture is drawn three times as large and made smaller at the end, so that slanted lines are
smooth.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from lmi.client.bench.picture import LARGER, SCALE, SIZE, Pen

# The size of the picture.
WIDTH = 960
HEIGHT = 400
# The margins around the area of each panel.
TOP = 64
BOTTOM = 56
LEFT = 64
RIGHT = 24
# How far the first and the last point are from the sides of the area.
INSET = 16
# Where the names of the lines are written.
LEGEND_Y = 18
COLOURS = ["#0f766e", "#c2410c", "#6d28d9", "#1d4ed8"]
INK = "#1f2937"
GREY = "#6b7280"
GRID = "#e5e7eb"
PAPER = "#ffffff"


class Point(NamedTuple):
    num_streams: int
    value: float


@dataclass
class Panel:
    """Values over numbers of streams: a line for each server, and single points."""

    title: str
    # By server, then by number of streams.
    lines: dict[str, dict[int, float]]
    # By name.
    points: dict[str, Point] = field(default_factory=dict)

    @property
    def highest(self) -> float:
        """The highest value, or 1 without any."""
        values = [point.value for point in self.points.values()]
        for line in self.lines.values():
            values += line.values()

        return max(values, default=1.0)

    @property
    def all_streams(self) -> list[int]:
        """The numbers of streams that any line has, ascending."""
        numbers: set[int] = set()
        for line in self.lines.values():
            numbers.update(line)

        return sorted(numbers)


def draw(panels: list[Panel], x_title: str, path: Path) -> None:
    """Draw panels beside each other into a file."""
    image = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), PAPER)
    pen = DottingPen(ImageDraw.Draw(image))
    width = WIDTH // len(panels)
    for number, panel in enumerate(panels):
        draw_panel(pen, Area(panel, number * width, width), x_title)

    draw_legend(pen, panels[0])
    picture = image.resize((WIDTH * 2, HEIGHT * 2), Image.Resampling.LANCZOS)
    picture.save(path, optimize=True)


class DottingPen(Pen):
    """A pen that also draws dots, and knows how long a text is."""

    def dot(
        self, x: float, y: float, colour: str, radius: float = 4, is_hollow: bool = False
    ) -> None:
        left = x - radius
        top = y - radius
        right = x + radius
        bottom = y + radius
        box = [left * SCALE, top * SCALE, right * SCALE, bottom * SCALE]
        fill = PAPER if is_hollow else colour
        self._canvas.ellipse(box, fill=fill, outline=colour, width=2 * SCALE)

    def width(self, text: str) -> float:
        font = ImageFont.load_default(SIZE * SCALE)
        return float(self._canvas.textlength(text, font=font)) / SCALE


class Area:
    """Where a panel is in the picture, and where its values are in it."""

    def __init__(self, panel: Panel, panel_x: float, panel_width: float) -> None:
        self.panel = panel
        self.left = panel_x + LEFT
        self.right = panel_x + panel_width - RIGHT
        # The distance of two ticks, and the first tick at or above all values.
        self.tick = tick(panel.highest)
        self.highest_tick = self.tick * -(-panel.highest // self.tick)

    def x(self, num_streams: int) -> float:
        numbers = self.panel.all_streams
        share = numbers.index(num_streams) / max(1, len(numbers) - 1)
        width = self.right - self.left - 2 * INSET
        return self.left + INSET + share * width

    def y(self, value: float) -> float:
        height = HEIGHT - TOP - BOTTOM
        return HEIGHT - BOTTOM - value / self.highest_tick * height


def draw_panel(pen: DottingPen, area: Area, x_title: str) -> None:
    panel = area.panel
    pen.text(area.left, TOP - 22, panel.title, INK, "lm", LARGER)
    draw_axes(pen, area, x_title)

    for colour, line in zip(COLOURS, panel.lines.values(), strict=False):
        points: list[tuple[float, float]] = []
        for num_streams, value in sorted(line.items()):
            points.append((area.x(num_streams), area.y(value)))

        pen.line(points, colour, 2.5)
        for x, y in points:
            pen.dot(x, y, colour)

    for point in panel.points.values():
        pen.dot(area.x(point.num_streams), area.y(point.value), GREY, is_hollow=True)


def draw_axes(pen: DottingPen, area: Area, x_title: str) -> None:
    """Draw a rule for each tick with its value, and the numbers of streams below."""
    for number in range(round(area.highest_tick / area.tick) + 1):
        value = number * area.tick
        y = area.y(value)
        text = f"{value:,.0f}".replace(",", " ")
        pen.line([(area.left, y), (area.right, y)], GRID, 1)
        pen.text(area.left - 8, y, text, GREY, "rm")

    numbers_y = HEIGHT - BOTTOM + 16
    for num_streams in area.panel.all_streams:
        x = area.x(num_streams)
        pen.text(x, numbers_y, str(num_streams), GREY, "mm")

    middle_x = (area.left + area.right) / 2
    title_y = HEIGHT - 16
    pen.text(middle_x, title_y, x_title, GREY, "mm")


def draw_legend(pen: DottingPen, panel: Panel) -> None:
    """Write the names of lines and points above all panels, each behind its dot."""
    x: float = LEFT
    for name, colour in zip(panel.lines, COLOURS, strict=False):
        x = draw_name(pen, x, name, colour)

    for name in panel.points:
        x = draw_name(pen, x, name, GREY, is_hollow=True)


def draw_name(
    pen: DottingPen, x: float, name: str, colour: str, *, is_hollow: bool = False
) -> float:
    """Write a name of the legend. Returns where the next one begins."""
    pen.dot(x + 6, LEGEND_Y, colour, 5, is_hollow)
    pen.text(x + 18, LEGEND_Y, name, INK, "lm")
    return x + 18 + pen.width(name) + 28


def tick(highest: float) -> float:
    """Return a round distance between ticks, which gives four to eight of them."""
    power = 1.0
    while power * 80 < highest:
        power *= 10

    distances = [power * factor for factor in (1, 2, 5, 10, 20, 50)]
    return next(distance for distance in distances if distance * 8 >= highest)
