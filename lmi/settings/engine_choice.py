"""Chooses the engine, from the engines' records: the one that an option names, the one for this
machine, or user code. Its record gives defaults, and further names of options.
"""

from collections.abc import Mapping

from msgspec import Struct

from lmi.errors import BadConfiguration
from lmi.settings.engine_rules import BATCH
from lmi.settings.handler import USER_CODE, Auto, ChosenEngine, Handler, installed
from lmi.settings.replicas import PIPELINE, TENSOR
from lmi.settings.steps import Resolution
from lmi.settings.table import find
from lmi.settings.tasks import OF_IMAGES, TASK, task_of
from lmi.settings.values import Values
from lmi.shared.machine import Machine

# The word of option.rolling_batch for the API of the dynamic batch, in front of any engine.
NO_ROLLING_BATCH = "disable"
KEY = "option.rolling_batch"
QUANTIZE = "option.quantize"
NEURON = "Neuron devices are not served here"
# Engines that option.rolling_batch can name in the reference and that have no handler here.
ENGINES_ELSEWHERE = {
    "deepspeed": "DeepSpeed is not served here",
    **dict.fromkeys(("neuronx", "tnx", "transformers-neuronx", "optimum"), NEURON),
}


def choose_engine(resolution: Resolution) -> None:
    """Choose the engine that an option names, the one for this machine, or user code."""
    code = resolution.code
    if code is not None and code.handler is not None:
        reason = f"{code.path} has a function {code.handler}"
        resolution.chosen_engine = ChosenEngine("python", USER_CODE, reason)
        return

    resolution.chosen_engine = _engine(resolution.values)


def _engine(values: Values) -> ChosenEngine:
    """Return the engine that the options name, or the first one for GPUs that is installed, if the
    other one lacks what the options ask for.
    """
    start = values.start
    handlers = start.handlers
    word: str = values.given(KEY, "auto")
    has_dynamic_batch = word.lower() == NO_ROLLING_BATCH
    asynchronous_option = _asynchronous_option(values)
    if has_dynamic_batch and asynchronous_option:
        values.note(f"{KEY}={word} means auto beside {asynchronous_option}")
        word = "auto"
        has_dynamic_batch = False

    try:
        name, reason = choose_handler(word, start.machine, handlers)
    except BadConfiguration as error:
        values.refuse(KEY, str(error))
        return ChosenEngine(word, handlers.get(word, Handler(load="")))

    gpu_engines = _names(Auto.ON_GPUS, installed(handlers))
    lack = _lack(values, handlers[name])
    if lack is not None and gpu_engines and gpu_engines[0] != name:
        values.warn(f"{lack.option}: {name} {lack.reason}, so the engine is {gpu_engines[0]}")
        name = gpu_engines[0]
        reason = f"{lack.option} needs it"
    elif word != name:
        values.note(f"{KEY}={word}: the engine is {name}, because {reason}")

    return ChosenEngine(name, handlers[name], reason, has_dynamic_batch)


def choose_handler(text: str, machine: Machine, handlers: Mapping[str, Handler]) -> tuple[str, str]:
    """Return the name of one of `handlers`, and the reason. Raises BadConfiguration, which lists
    the allowed words.
    """
    word = text.lower()
    usable = installed(handlers)
    if word in ("auto", NO_ROLLING_BATCH):
        gpu_engines = _names(Auto.ON_GPUS, usable)
        if machine.gpus and gpu_engines:
            return gpu_engines[0], f"{gpu_engines[0]} is installed and a GPU is visible"

        other_engines = _names(Auto.ELSEWHERE, usable)
        if other_engines and not machine.gpus:
            return other_engines[0], "no GPU is visible"

        if other_engines:
            missing = " or ".join(_names(Auto.ON_GPUS, handlers))
            return other_engines[0], f"{missing} is not installed"

    if word in usable:
        return word, "asked for"

    other_names: list[str] = []
    for name, handler in usable.items():
        if word in handler.other_names:
            return name, f"{word} is served by {name}"

        other_names += handler.other_names

    words = ["auto", NO_ROLLING_BATCH, *sorted(other_names), *sorted(usable)]
    raise BadConfiguration(", ".join(words) + _why_not(word, handlers))


def settle_engine(resolution: Resolution) -> None:
    """Put the engine's name in the place of the word that was given, and warn of its caveat."""
    values = resolution.values
    engine = resolution.chosen_engine
    if engine.handler.caveat:
        values.warn(f"{engine.name}: {engine.handler.caveat}")

    values.settle(KEY, engine.name, engine.reason)


def read_meanings(resolution: Resolution) -> None:
    """Read each option that the engine has as another name of an option of the table. Note which
    of the others set something of the engine, and which it does not use.
    """
    values = resolution.values
    handler = resolution.chosen_engine.handler
    for key, target in handler.means.items():
        if key not in values:
            continue

        if find(target) is None:
            values.explain(key, f"sets {target}")
            continue

        if key in handler.wins and target in values:
            if values.given(key) != values.given(target):
                values.warn(
                    f"{values.how_given(target).place}: {values.how_given(key).place} counts"
                )

            values.drop(target)

        values.read_as(key, target)

    for key in handler.unused.keys() & values.picked.keys():
        values.explain(key, "not used")


def choose_engine_defaults(resolution: Resolution) -> None:
    """Choose the engine's defaults, and `batch_size` for the dynamic batch. Note which options of
    the dynamic batch have no effect.
    """
    values = resolution.values
    engine = resolution.chosen_engine
    if engine.handler is USER_CODE:
        return

    for key, value in engine.handler.defaults.items():
        values.choose(key, value, f"default of {engine.name}")

    reasons = {"max_batch_delay": "unneeded, a request joins the running batch at once"}
    if not engine.has_dynamic_batch:
        alone = "has an effect with option.rolling_batch=disable alone"
        reasons = {"batch_size": alone, "option.enable_streaming": alone} | reasons
    elif "batch_size" in values:
        values.choose(BATCH, values.given("batch_size"), "batch_size")

    for key, reason in reasons.items():
        if key in values:
            values.note(f"{values.how_given(key).place}: {reason}")


def _names(auto: Auto, handlers: Mapping[str, Handler]) -> list[str]:
    """Return the engines that `auto` chooses on such machines, the first one first."""
    return [name for name, handler in handlers.items() if handler.auto is auto]


def _why_not(word: str, handlers: Mapping[str, Handler]) -> str:
    """Return why a word names no engine here, as the end of an error, or ""."""
    if word in handlers:
        return f" ({word}: the library {handlers[word].library} is not installed)"

    if word not in ENGINES_ELSEWHERE:
        return ""

    engines = _names(Auto.ELSEWHERE, handlers) + _names(Auto.ON_GPUS, handlers)
    return f"; auto chooses {' or '.join(engines)} ({word}: {ENGINES_ELSEWHERE[word]})"


class Lack(Struct, frozen=True):
    """An option that was given, and the reason why an engine cannot follow it."""

    option: str
    reason: str


def _lack(values: Values, handler: Handler) -> Lack | None:
    """Return the first option that asks for what an engine lacks and one for GPUs may have, or
    None.
    """
    degree_option = _option_of_several_devices(values)
    if handler.is_one_device and degree_option:
        return Lack(degree_option, "runs on one device")

    methods = handler.quantize_methods
    method = values.given(QUANTIZE)
    if methods is not None and method is not None and method not in methods:
        reason = f"quantises by {' and '.join(sorted(methods))} alone"
        return Lack(values.how_given(QUANTIZE).assignment, reason)

    if task_of(values) == OF_IMAGES and not handler.reads_images:
        return Lack(values.how_given(TASK).assignment, "reads no images")

    return None


def _option_of_several_devices(values: Values) -> str:
    """Return the first option that asks for a parallel degree over 1, as messages name it, or
    "".
    """
    num_gpus = 0 if values.given("option.device") == "cpu" else len(values.start.machine.gpus)
    for key in (TENSOR, PIPELINE):
        degree = values.given(key, 1)
        if degree == "max":
            degree = num_gpus

        if degree > 1:
            return values.how_given(key).assignment

    return ""


def _asynchronous_option(values: Values) -> str:
    """Return the option that asks for LMI's asynchronous mode, or "". In that mode the engine makes
    the batches, despite `disable`.
    """
    entry_point = values.given("option.entryPoint", "")
    if entry_point.endswith("async_service"):
        return f"option.entryPoint={entry_point}"

    if values.given("option.async_mode"):
        return "option.async_mode=true"

    return ""
