"""Draws lines over a number of streams as a PNG, with Pillow, which comes with vLLM.

The picture is drawn three times as large and made smaller at the end, so that slanted lines are
smooth.
"""

from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from lmi.client.bench.picture import LARGER, SCALE, SIZE, Pen

# of the picture
WIDTH = 960
HEIGHT = 400
# around the area of each panel
TOP = 64
BOTTOM = 56
LEFT = 64
RIGHT = 24
COLOURS = ["#0f766e", "#c2410c", "#6d28d9", "#1d4ed8"]
INK = "#1f2937"
GREY = "#6b7280"
GRID = "#e5e7eb"
PAPER = "#ffffff"


@dataclass
class Panel:
    title: str
    # name -> streams -> value
    lines: dict[str, dict[int, float]]
    points: dict[str, tuple[int, float]] = field(default_factory=dict)  # single values

    @property
    def highest(self) -> float:
        values = [value for line in self.lines.values() for value in line.values()]
        return max([*values, *(value for _, value in self.points.values())], default=1.0)

    @property
    def places(self) -> list[int]:
        return sorted({place for line in self.lines.values() for place in line})


def draw(panels: list[Panel], x_title: str, path: Path) -> None:
    image = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), PAPER)
    pen = DottingPen(ImageDraw.Draw(image))
    width = WIDTH // len(panels)
    for number, panel in enumerate(panels):
        draw_panel(pen, panel, number * width, width, x_title)

    draw_legend(pen, [name for name in panels[0].lines], list(panels[0].points))
    image.resize((WIDTH * 2, HEIGHT * 2), Image.Resampling.LANCZOS).save(path, optimize=True)


class DottingPen(Pen):
    def dot(
        self, x: float, y: float, colour: str, radius: float = 4, is_hollow: bool = False
    ) -> None:
        box = [
            (x - radius) * SCALE,
            (y - radius) * SCALE,
            (x + radius) * SCALE,
            (y + radius) * SCALE,
        ]
        self._canvas.ellipse(
            box, fill=PAPER if is_hollow else colour, outline=colour, width=2 * SCALE
        )

    def width(self, text: str) -> float:
        return (
            float(self._canvas.textlength(text, font=ImageFont.load_default(SIZE * SCALE))) / SCALE
        )


def draw_panel(pen: DottingPen, panel: Panel, start: float, width: float, x_title: str) -> None:
    step = tick(panel.highest)
    # The first tick at or above all values
    top = step * -(-panel.highest // step)

    def x(place: int) -> float:
        share = panel.places.index(place) / max(1, len(panel.places) - 1)
        return start + LEFT + 16 + share * (width - LEFT - RIGHT - 32)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    pen.text(start + LEFT, TOP - 22, panel.title, INK, "lm", LARGER)
    for number in range(round(top / step) + 1):
        pen.line(
            [(start + LEFT, y(number * step)), (start + width - RIGHT, y(number * step))], GRID, 1
        )
        pen.text(
            start + LEFT - 8,
            y(number * step),
            f"{number * step:,.0f}".replace(",", " "),
            GREY,
            "rm",
        )

    for place in panel.places:
        pen.text(x(place), HEIGHT - BOTTOM + 16, str(place), GREY, "mm")

    pen.text(start + LEFT + (width - LEFT - RIGHT) / 2, HEIGHT - 16, x_title, GREY, "mm")
    for colour, line in zip(COLOURS, panel.lines.values(), strict=False):
        points = [(x(place), y(value)) for place, value in sorted(line.items())]
        pen.line(points, colour, 2.5)
        for point in points:
            pen.dot(*point, colour)

    for place, value in panel.points.values():
        pen.dot(x(place), y(value), GREY, is_hollow=True)


def draw_legend(pen: DottingPen, lines: list[str], points: list[str]) -> None:
    start: float = LEFT
    for name, colour, is_hollow in [
        *((name, colour, False) for name, colour in zip(lines, COLOURS, strict=False)),
        *((name, GREY, True) for name in points),
    ]:
        pen.dot(start + 6, 18, colour, 5, is_hollow)
        pen.text(start + 18, 18, name, INK, "lm")
        start += 18 + pen.width(name) + 28


def tick(highest: float) -> float:
    """A round distance between ticks, which gives four to eight of them."""
    step = 1.0
    while step * 80 < highest:
        step *= 10

    return next(step * factor for factor in (1, 2, 5, 10, 20, 50) if step * factor * 8 >= highest)
