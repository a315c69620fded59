"""The plots of a report as one PNG, which Pillow draws: the same lines as on the page.

It is drawn larger and then made smaller, so that slanted lines are smooth.
"""

from pathlib import Path
from typing import Any

import click

from lmi.client.bench.page import Plot, plots_of, short

try:
    from PIL import Image, ImageDraw, ImageFont
except ImportError:
    raise click.ClickException("--png needs Pillow: pip install pillow") from None

SCALE = 3
# of a plot, and of the names of the servers above all
WIDTH = 560
HEIGHT = 320
HEAD = 44
# around the area of a plot
TOP = 40
BOTTOM = 50
LEFT = 60
RIGHT = 24
# of letters
SIZE = 13
LARGER = 15
COLOURS = ("#0b62d6", "#c2410c")  # of the servers
INK = "#1c2024"
SOFT = "#60646c"
RULE = "#d9dce0"
PAPER = "#ffffff"


def write_picture(report: dict[str, Any], path: Path) -> None:
    """Draw two plots in a row. Raises OSError."""
    plots = plots_of(report)
    urls = [server["url"] for server in report["servers"]]
    size = 2 * WIDTH, HEAD + -(-len(plots) // 2) * HEIGHT
    image = Image.new("RGB", (size[0] * SCALE, size[1] * SCALE), PAPER)
    pen = Pen(ImageDraw.Draw(image))

    for number, (url, colour) in enumerate(zip(urls, COLOURS, strict=False)):
        left = LEFT + number * size[0] / 2
        pen.line([(left, HEAD / 2), (left + 24, HEAD / 2)], colour, 2.5)
        pen.text(left + 32, HEAD / 2, url, INK, "lm")

    for number, plot in enumerate(plots):
        _draw(pen, plot, number % 2 * WIDTH, HEAD + number // 2 * HEIGHT)

    image.resize((size[0] * 2, size[1] * 2), Image.Resampling.LANCZOS).save(
        path, "PNG", optimize=True
    )


class Pen:
    """Draws in the units of the finished picture."""

    def __init__(self, canvas: ImageDraw.ImageDraw) -> None:
        self._canvas = canvas

    def line(self, points: list[tuple[float, float]], colour: str, width: float = 1) -> None:
        scaled = [(x * SCALE, y * SCALE) for x, y in points]
        self._canvas.line(scaled, fill=colour, width=round(width * SCALE), joint="curve")

    def text(
        self, x: float, y: float, text: str, colour: str, anchor: str, size: float = SIZE
    ) -> None:
        font = ImageFont.load_default(size * SCALE)
        self._canvas.text((x * SCALE, y * SCALE), text, fill=colour, font=font, anchor=anchor)


def _draw(pen: Pen, plot: Plot, left: float, top: float) -> None:
    most_x, most_y = plot.most

    def at(x: float, y: float) -> tuple[float, float]:
        across = x / most_x * (WIDTH - LEFT - RIGHT)
        down = (1 - y / most_y) * (HEIGHT - TOP - BOTTOM)
        return left + LEFT + across, top + TOP + down

    pen.text(left + LEFT, top + TOP / 2, plot.title, INK, "lm", LARGER)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        start = at(0, share * most_y)
        end = at(most_x, share * most_y)
        pen.line([start, end], RULE)
        pen.text(start[0] - 8, start[1], short(share * most_y), SOFT, "rm")
        x, y = at(share * most_x, 0)
        pen.text(x, y + 16, short(share * most_x), SOFT, "mm")

    pen.text(left + (LEFT + WIDTH - RIGHT) / 2, top + HEIGHT - 14, plot.unit, SOFT, "mm")
    for line, colour in zip(plot.lines, COLOURS, strict=False):
        if line:
            pen.line([at(x, y) for x, y in line], colour, 2)
