"""The steps that choose and check options of the server itself, and not of its model or engine.

An option whose value depends on the machine alone has a `choose` at its field in `config.py`, and
one step here calls them all.
"""

from importlib.util import find_spec

from lmi.settings.steps import Resolution
from lmi.settings.table import OPTIONS
from lmi.sources.place import default_download_dir

# The modules of an extra that an option of the server needs. `Handler.check` looks for those of an
# engine's options.
LIBRARIES = {
    "option.otlp_traces_endpoint": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
}


def choose_by_machine(resolution: Resolution) -> None:
    """Choose the options that were not given and have a `choose` at their field."""
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
    """Refuse an option of the server whose extra is not installed.

    Without this check a front end would fail, much later.
    """
    values = resolution.values
    for key, modules in LIBRARIES.items():
        if key not in values or all(_is_installed(module) for module in modules):
            continue

        library = modules[0].partition(".")[0]
        values.fail(f"{values.how_given(key).assignment}: the library {library} is not installed")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        # The package of the module is missing.
        return False


def fit_body_memory(resolution: Resolution) -> None:
    """Make the room for bodies large enough for one body of the largest allowed size."""
    values = resolution.values
    key = "max_body_memory"
    max_request_bytes = values.final("max_request_size")
    if values.final(key) >= max_request_bytes:
        return

    if key in values:
        assignment = values.how_given(key).assignment
        values.warn(f"{assignment}: less than max_request_size, so {max_request_bytes} bytes count")

    values.settle(key, max_request_bytes, "max_request_size")


def choose_download_dir(resolution: Resolution) -> None:
    """Choose the folder for downloads if none was given, else make its path absolute."""
    values = resolution.values
    start = resolution.start
    key = "download_dir"
    if key in values:
        folder = start.cwd / values.given(key)
        values.settle(key, str(folder.absolute()), "absolute")
    else:
        folder = default_download_dir(start.environ)
        values.choose(key, str(folder.absolute()), "the user's cache")
