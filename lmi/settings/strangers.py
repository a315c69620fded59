"""What the serving.properties of a stranger may not do: run code, or reach beyond its model.

A file is a stranger's if it came with one of several models, or from a hub or a bucket. It may set
options of its model: what the model is called, how long its context is, how its answers look. Other
options belong to the operator. He gives them on the command line or in the environment, or lets the
file give those that `allow_model_options` names. `Option.grants` and `PLAIN_OPTIONS` say which
options are which.

The file of a folder that the operator made counts in full, and the start notes what it switches on.
"""

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from lmi.settings.given import Given
from lmi.settings.handler import USER_CODE, ChosenEngine, Handler
from lmi.settings.kinds import local_path
from lmi.settings.other_names import ENGINE_KEYS, WITHOUT_EFFECT
from lmi.settings.secure_mode import LOAD_FORMAT, SAFE_LOAD_FORMATS, SAFE_OPTIONS, paths_outside
from lmi.settings.start import StartInputs
from lmi.settings.steps import Resolution
from lmi.settings.table import DRAFT, MODEL, find, is_of_server
from lmi.settings.values import Picked, Values
from lmi.sources.origin import came_from
from lmi.sources.source import remote
from lmi.user_code.options import UserCodeConfig

PROPERTIES = "serving.properties"
ALLOWED = "allow_model_options"
ALL = "*"
OF_SEVERAL = "one of several models"

# They name addresses at which engines listen, and take what they get for commands.
OF_NODES = frozenset(
    (
        "option.nnodes",
        "option.node_rank",
        "option.master_addr",
        "option.master_port",
    )
)

# Options of engines that are numbers, switches, or words of a short list. Any other may name code
# or a file, as do vLLM's worker_extension_cls, hf_overrides, logits_processors and
# kv_transfer_config.
PLAIN_OPTIONS = (SAFE_OPTIONS - OF_NODES) | frozenset(
    (
        "option.limit_mm_per_prompt",
        "option.max_num_tokens",
        "option.enable_kv_cache_reuse",
        "option.enable_trt_overlap",
        "option.disable_custom_all_reduce",
        "option.block_size",
        "option.fully_sharded_loras",
        "option.max_logprobs",
        "option.stream_interval",
        "option.enable_expert_parallel",
        "option.max_output_len",
        "option.long_lora_scaling_factors",
        "option.calculate_kv_scales",
        "option.async_scheduling",
        "option.enable_chunked_context",
        "option.max_batch_size",
        "option.max_seq_len",
        "option.max_tokens",
        "option.enable_block_reuse",
        "option.enable_overlap_scheduler",
    )
)

# Options of which these words are plain, while others name code.
PLAIN_WORDS = {
    LOAD_FORMAT: SAFE_LOAD_FORMATS,
    "option.tokenizer_mode": ("auto", "hf", "slow", "mistral"),
}


class Power(Struct, frozen=True):
    """An option of a model's file, and what it lets the file's author do."""

    given: Given
    grants: str

    @property
    def refusal(self) -> str:
        """The fault where a stranger's file takes it."""
        key = self.given.key
        how = f"the command line, the environment or {ALLOWED}={key}"
        return f"{self.given.place}: {self.grants}; that is for the operator, by {how}"


def check(resolution: Resolution) -> None:
    """Add a fault for each power that the file of a stranger takes. Note those that the file of the
    operator's own folder takes.
    """
    values = resolution.values
    engine = resolution.chosen_engine
    stranger = _stranger(resolution.start)
    if not stranger:
        _note_powers(values, engine, resolution.code)
        return

    for power in (*_powers(values, engine), *_paths(values)):
        if not _is_allowed(values, power.given):
            values.fail(f"{power.refusal} (the file is of {stranger})")


def _stranger(start: StartInputs) -> str:
    """Return the stranger to whom the file of the served folder belongs, or "" if to none."""
    if start.folder is None:
        return ""

    if start.folder in start.untrusted:
        return OF_SEVERAL

    return came_from(start.folder / PROPERTIES)


def _note_powers(values: Values, engine: ChosenEngine, code: UserCodeConfig | None) -> None:
    """Note what the folder of the only model switches on."""
    for power in _powers(values, engine):
        if not is_of_server(power.given.key):
            values.note(
                f"{power.given.assignment}: the model's own file switches on {power.grants}"
            )

    if code is not None and code.path:
        values.note(f"{code.path}: the model's own code runs, in a process of its own")


def _powers(values: Values, engine: ChosenEngine) -> Iterator[Power]:
    """Yield each option of the file that runs code or reaches beyond the model."""
    for winner in values.picked.values():
        if not winner.given.is_from_file:
            continue

        grants = _grants(winner, engine)
        if grants:
            yield Power(winner.given, grants)


def _grants(winner: Picked, engine: ChosenEngine) -> str:
    """Return what an option's value lets its author do, or "" if it stays within the model."""
    option = find(winner.given.key)
    if option is None:
        return _grants_of_engine(winner, engine)

    if winner.value == option.default:
        return ""

    if option.part == "server":
        return "a setting of the whole server"

    return option.grants


def _grants_of_engine(winner: Picked, engine: ChosenEngine) -> str:
    """Return what an option that is not in the table lets its author do, or "" if it is plain or
    the engine does not read it.
    """
    key = winner.given.key
    if not _is_read(key, engine.handler):
        return ""

    is_plain = key in PLAIN_OPTIONS
    if key in PLAIN_WORDS:
        is_plain = winner.value in PLAIN_WORDS[key]

    if is_plain:
        return ""

    return f"an argument of {engine.name}, which may name code or files"


def _is_read(key: str, handler: Handler) -> bool:
    """Return whether an engine may read an option that is not in the table."""
    is_without_effect = key in WITHOUT_EFFECT or key in handler.unused
    if handler is USER_CODE or is_without_effect or not key.startswith("option."):
        return False

    keys = handler.option_keys()
    if keys is not None:
        return key in keys

    return key in ENGINE_KEYS or not handler.ignores_unknown


def _paths(values: Values) -> Iterator[Power]:
    """Yield each path outside of the model's folder that its file names, and the other model that
    it puts in the model's place.

    The path of one of several models is not among them, since `lmi/models/settings.py` checks it.
    """
    folder = values.start.folder
    assert folder is not None
    bases = [folder, values.start.cwd]
    is_of_several = folder in values.start.untrusted
    for path, entry in paths_outside(values, bases, [folder]):
        is_in_store = entry.key == DRAFT and _is_in_store(values, path)
        is_checked = is_in_store or (entry.key == MODEL and is_of_several)
        if entry.is_from_file and not is_checked:
            yield Power(entry, f"{path.resolve()}, which is outside of the model's folder")

    if not is_of_several and _is_elsewhere(values, bases):
        yield Power(values.how_given(MODEL), "another model, which is fetched")


def _is_elsewhere(values: Values, bases: list[Path]) -> bool:
    """Return whether the file names another model, which must be fetched, as the model."""
    if MODEL not in values or not values.how_given(MODEL).is_from_file:
        return False

    text = local_path(values.given(MODEL))
    is_here = any((base / text).exists() for base in bases)
    return remote(text, exists_locally=is_here) is not None


def _is_in_store(values: Values, path: Path) -> bool:
    """Return whether a path lies in the store of several models."""
    store = Path(values.final("model_store"))
    return path.resolve().is_relative_to(store.resolve())


def _is_allowed(values: Values, entry: Given) -> bool:
    """Return whether the operator allows an option by name, or gives the same value himself."""
    picked = values.picked.get(ALLOWED)
    allowed_names: set[str] = set()
    if picked is not None and not picked.given.is_from_file:
        allowed_names.update(picked.value)

    if {ALL, entry.key, entry.key.removeprefix("option.")} & allowed_names:
        return True

    winner = values.picked[entry.key]
    for rival in winner.shadowed:
        if not rival.is_from_file and _is_same(rival, winner):
            return True

    return False


def _is_same(rival: Given, winner: Picked) -> bool:
    """Return whether a value that does not count is the one that does."""
    try:
        return bool(rival.value() == winner.value)
    except ValueError:
        return False
