"""Chooses the model of the served folder, or the one that options name."""

from pathlib import Path

from lmi.errors import ModelUnusable, shorten
from lmi.settings.kinds import local_path
from lmi.settings.model_names import choose_names, name_by_load_models, source_name
from lmi.settings.served_folder import DEMO, demo_folder
from lmi.settings.shown import Setting
from lmi.settings.steps import Resolution
from lmi.settings.table import MODEL, is_of_server
from lmi.settings.values import Values
from lmi.sources.source import GGUF, fault, listed


def choose_model(resolution: Resolution) -> None:
    """Choose the model and its names. Raises ModelUnusable, which names the option, or says that
    none was given.

    If user code is the model, its folder need not hold a model: the code may load files from
    anywhere.
    """
    values = resolution.values
    model_id = values.given(MODEL)
    if model_id is not None and model_id in resolution.missing:
        choose_names(values, "", source_name(model_id))
        resolution.path = Path(model_id)
        return

    folder = resolution.start.folder
    try:
        if resolution.is_user_code:
            path = user_code_folders(values)[0]
        else:
            path = _whole_model(values)

        name = DEMO if path == demo_folder() else Path(model_id or path).name
    except ModelUnusable as error:
        source = f"no {MODEL}"
        if MODEL in values:
            source = Setting.of(values, MODEL).source

        raise ModelUnusable(f"{error} ({source})") from None

    # For a fetched model the option's text is its folder, but its name is that of the source.
    sources = {str(path): source for source, path in resolution.fetched.items()}
    if model_id in sources:
        name = source_name(sources[model_id])

    resolved_path = path.resolve()
    _warn_of_other_models(values, resolved_path)
    values.choose(MODEL, str(resolved_path), "the folder" if folder else "the built-in demo")
    loaded_name = name_by_load_models(values, folder or resolved_path)
    choose_names(values, loaded_name, name)
    resolution.path = path


def check_model(resolution: Resolution) -> None:
    """Raise ModelUnusable if the model's files are here and the engine cannot run them."""
    if resolution.is_model_here:
        resolution.chosen_engine.handler.check_model(resolution.path)


def user_code_folders(values: Values) -> list[Path]:
    """Return the folders that may hold the model's code: the model's, then that of
    serving.properties.
    """
    folder = values.start.folder
    try:
        path = _model_path(values)
    except ModelUnusable:
        path = folder or values.start.cwd

    if folder is None or folder == path:
        return [path]

    return [path, folder]


def _whole_model(values: Values) -> Path:
    """Return the model's folder. Raises ModelUnusable unless its files are there."""
    path = _model_path(values)
    if not (path / "config.json").is_file():
        content = "does not exist"
        if path.is_dir():
            content = listed(sorted(entry.name for entry in path.iterdir()))

        raise ModelUnusable(f"{path}: {content}; a model's folder has a config.json")

    if any(path.glob(f"*{GGUF}")):
        reason = fault(path)
        if reason:
            raise ModelUnusable(f"{path}: {reason}")

    return path


def _model_path(values: Values) -> Path:
    """Return the folder that the option names, or else the served one. Raises ModelUnusable if
    there is no such folder.
    """
    folder = values.start.folder
    cwd = values.start.cwd
    if MODEL not in values:
        return folder or demo_folder()

    model_id = local_path(values.given(MODEL))
    for base in (folder or cwd, cwd):
        if (base / model_id).is_dir():
            return base / model_id

    if model_id == DEMO:
        return demo_folder()

    if model_id.endswith(GGUF):
        raise ModelUnusable(f"{shorten(model_id)}: no such file in {folder or cwd}")

    raise ModelUnusable(f"{shorten(model_id)}: no such folder in {folder or cwd}")


def _warn_of_other_models(values: Values, path: Path) -> None:
    """Warn if options name two models, because only one is served."""
    winner = values.picked.get(MODEL)
    if winner is None:
        return

    folder = values.start.folder
    if folder is not None and folder.resolve() != path and (folder / "config.json").is_file():
        values.warn(f"{winner.given.place}: it is served and the model in {folder} is not")

    for rival in winner.shadowed:
        if rival.text != winner.given.text:
            values.warn(f"{rival.assignment}: has no effect beside {winner.given.source}")


def warn_of_models(resolution: Resolution) -> None:
    """Warn of options of a model where the server starts without one. Nothing is fetched: each of
    several models is resolved when it is loaded.
    """
    values = resolution.values
    resolution.missing = ()
    for winner in values.picked.values():
        if winner.given.key in (MODEL, "load_models"):
            values.warn(
                f"{winner.given.assignment}: not served, multi_model starts without a model"
            )
        elif winner.given.is_from_file and not is_of_server(winner.given.key):
            values.note(
                f"{winner.given.place}: no effect with multi_model, each model has its own file"
            )
