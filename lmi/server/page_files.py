"""The files of the pages for people, and their media types."""

from pathlib import Path

FOLDER = Path(__file__).parent / "pages"
FILES = {path.name: path.read_bytes() for path in sorted(FOLDER.iterdir())}
TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript"}
