"""Chooses values of the server itself: the room for bodies and the folder for downloads. And checks
what its options need.

Values that depend on the machine alone are chosen by the `choose` of their field in `config.py`.
"""

from importlib.util import find_spec

from lmi.settings.steps import Resolution
from lmi.settings.table import OPTIONS
from lmi.sources.place import default_download_dir

# The modules of an extra that an option of the server needs. Engines look for those of their
# options in `check` of their `Handler`.
LIBRARIES = {
    "option.otlp_traces_endpoint": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
}


def choose_by_machine(resolution: Resolution) -> None:
    """Choose each option that was not given, by the `choose` of its field."""
    for option in OPTIONS:
        choice = option.choose(resolution.start.machine)
        if choice is not None:
            resolution.values.choose(option.key, *choice)


def check_takeover(resolution: Resolution) -> None:
    """Refuse a takeover where the new server would lack something that the old one has."""
    values = resolution.values
    if not values.final("takeover"):
        return

    if values.final("multi_model"):
        values.refuse(
            "takeover", "false with multi_model, since the new server would not have the models"
        )
    elif values.final("with_gateway"):
        values.refuse(
            "takeover",
            "false with with_gateway; `lmi gateway` of its own goes on in front of both servers",
        )
    elif values.final("port") == 0:
        values.refuse("takeover", "false where port=0 takes a free one")


def check_libraries(resolution: Resolution) -> None:
    """Refuse an option of the server that needs an extra which is not installed. Else a front end
    would fail, much later.
    """
    values = resolution.values
    for key, modules in LIBRARIES.items():
        if key not in values or all(map(_is_there, modules)):
            continue

        library = modules[0].partition(".")[0]
        values.fail(f"{values.how_given(key).assignment}: the library {library} is not installed")


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        # Not even its parent is there.
        return False


def fit_body_memory(resolution: Resolution) -> None:
    """Make the room for bodies large enough for one body of the largest allowed size."""
    values = resolution.values
    key = "max_body_memory"
    largest = values.final("max_request_size")
    if values.final(key) >= largest:
        return

    if key in values:
        assignment = values.how_given(key).assignment
        values.warn(f"{assignment}: less than max_request_size, so {largest} bytes count")

    values.settle(key, largest, "max_request_size")


def choose_download_dir(resolution: Resolution) -> None:
    """Choose the folder for downloads, or make the given one an absolute path."""
    values = resolution.values
    start = resolution.start
    key = "download_dir"
    if key in values:
        values.settle(key, str((start.cwd / values.given(key)).absolute()), "absolute")

    values.choose(key, str(default_download_dir(start.environ).absolute()), "the user's cache")
