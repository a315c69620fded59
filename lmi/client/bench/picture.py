"""The plots of a report as one PNG, which Pillow draws: the same lines as on the page.

It is drawn larger and then made smaller, so that slanted lines are smooth.
"""

from pathlib import Path
from typing import Any

import click

from lmi.client.bench.plots import GRID, Area, Plot, plots_of, short

try:
    from PIL import Image, ImageDraw, ImageFont
except ImportError:
    raise click.ClickException("--png needs Pillow: pip install pillow") from None

SCALE = 3
# The size of a plot, and the height of the names of the servers above all.
WIDTH = 560
HEIGHT = 320
HEAD = 44
# The margins around the area of a plot.
TOP = 40
BOTTOM = 50
LEFT = 60
RIGHT = 24
# The sizes of letters.
SIZE = 13
LARGER = 15
# The colours of the servers.
COLOURS = ("#0b62d6", "#c2410c")
INK = "#1c2024"
SOFT = "#60646c"
RULE = "#d9dce0"
PAPER = "#ffffff"


def write_picture(report: dict[str, Any], path: Path) -> None:
    """Draw the names of the servers, and below them two plots in a row. Raises OSError."""
    plots = plots_of(report)
    num_rows = -(-len(plots) // 2)
    width = 2 * WIDTH
    height = HEAD + num_rows * HEIGHT
    image = Image.new("RGB", (width * SCALE, height * SCALE), PAPER)
    pen = Pen(ImageDraw.Draw(image))

    urls = [server["url"] for server in report["servers"]]
    _draw_names(pen, urls)
    for number, plot in enumerate(plots):
        row, column = divmod(number, 2)
        _draw(pen, plot, column * WIDTH, HEAD + row * HEIGHT)

    picture = image.resize((width * 2, height * 2), Image.Resampling.LANCZOS)
    picture.save(path, "PNG", optimize=True)


def _draw_names(pen: "Pen", urls: list[str]) -> None:
    """Write the URL of each server beside a line in its colour."""
    x = LEFT
    y = HEAD / 2
    for url, colour in zip(urls, COLOURS, strict=False):
        start = (x, y)
        end = (x + 24, y)
        pen.line([start, end], colour, 2.5)
        pen.text(x + 32, y, url, INK, "lm")
        x += WIDTH


class Pen:
    """Draws in the units of the finished picture."""

    def __init__(self, canvas: ImageDraw.ImageDraw) -> None:
        self._canvas = canvas

    def line(self, points: list[tuple[float, float]], colour: str, width: float = 1) -> None:
        """Draw a line through points."""
        scaled = [(x * SCALE, y * SCALE) for x, y in points]
        self._canvas.line(scaled, fill=colour, width=round(width * SCALE), joint="curve")

    def text(
        self, x: float, y: float, text: str, colour: str, anchor: str, size: float = SIZE
    ) -> None:
        """Write a text whose `anchor` is at a point. Source: Pillow's text anchors."""
        font = ImageFont.load_default(size * SCALE)
        self._canvas.text((x * SCALE, y * SCALE), text, fill=colour, font=font, anchor=anchor)


def _draw(pen: Pen, plot: Plot, left_x: float, top_y: float) -> None:
    """Draw a plot at this corner of the picture."""
    width = WIDTH - LEFT - RIGHT
    height = HEIGHT - TOP - BOTTOM
    first_x = left_x + LEFT
    area = plot.area(first_x, top_y + TOP, width, height)
    _draw_grid(pen, area)

    title_y = top_y + TOP / 2
    pen.text(first_x, title_y, plot.title, INK, "lm", LARGER)
    middle_x = first_x + width / 2
    unit_y = top_y + HEIGHT - 14
    pen.text(middle_x, unit_y, plot.unit, SOFT, "mm")

    for line, colour in zip(plot.lines, COLOURS, strict=False):
        if line:
            points = [area.place(x, y) for x, y in line]
            pen.line(points, colour, 2)


def _draw_grid(pen: Pen, area: Area) -> None:
    """Draw rules, each with its value to the left, and the values below."""
    for share in GRID:
        value_x = share * area.max_x
        value_y = share * area.max_y

        start_x, rule_y = area.place(0, value_y)
        end = area.place(area.max_x, value_y)
        pen.line([(start_x, rule_y), end], RULE)
        pen.text(start_x - 8, rule_y, short(value_y), SOFT, "rm")

        x, bottom_y = area.place(value_x, 0)
        pen.text(x, bottom_y + 16, short(value_x), SOFT, "mm")
