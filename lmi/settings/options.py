"""The table of options, read from the fields of the settings, and the keys that variables of the environment mean.

Sources: LMI's serving.properties, TGI's environment variables, and AWS's pages of LMI and of its containers.
"""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields
from typing import Any

from lmi.settings.config import EngineConfig, ModelConfig, ServerConfig
from lmi.settings.kinds import OF_TYPE, is_true
from lmi.settings.option import Option

# The key that a variable means. TRANSLATED converts values of another form.
OTHER_ENV = {
    "MAX_INPUT_LENGTH": "max_input_length",
    "MAX_INPUT_TOKENS": "max_input_length",
    "CUDA_MEMORY_FRACTION": "option.gpu_memory_utilization",
    "ENABLE_CUDA_GRAPHS": "option.enforce_eager",
    "LWS_GROUP_SIZE": "option.nnodes",  # a Kubernetes LeaderWorkerSet gives these three to each pod
    "LWS_WORKER_INDEX": "option.node_rank",
    "LWS_LEADER_ADDRESS": "option.master_addr",
}
TRANSLATED: dict[str, Callable[[str], str]] = {"ENABLE_CUDA_GRAPHS": lambda text: str(not is_true(text, True)).lower()}


def _options(part: str, settings: type) -> Iterator[Option]:
    """Yield the options of a class of settings, then those of its bases, each in the order of its fields."""
    declared: dict[str, Field[Any]] = vars(settings)["__dataclass_fields__"]
    filled = {one.name for one in fields(settings)}  # not those of a ClassVar
    for each in settings.__mro__:
        for name in vars(each).get("__annotations__", ()):
            one = declared[name]
            if facts := dict(one.metadata):
                held = str(one.type).removeprefix("ClassVar[").removesuffix("]")
                facts["kind"] = facts["kind"] or OF_TYPE.get(held) or OF_TYPE[held.removesuffix(" | None")]
                facts.setdefault("key", ("" if part == "server" else "option.") + name.removesuffix("_s"))
                default = {} if one.default is MISSING else one.default
                field = f"{part}.{name}" if name in filled else ""
                yield Option(default=default, part=part, field=field, declared=(each, name), **facts)


OPTIONS = (*_options("server", ServerConfig), *_options("model", ModelConfig), *_options("engine", EngineConfig))
BY_KEY = {key: option for option in OPTIONS for key in (option.key, *option.aliases)}
_BY_ENV_NAME = {key.removeprefix("option.").replace("_", "").lower(): key for key in BY_KEY}


def find(key: str) -> Option | None:
    """Return the option of a key or alias of serving.properties, or None if no field is that option."""
    return BY_KEY.get(key)


def is_of_server(key: str) -> bool:
    """Return whether an option belongs to the whole server, and not to a model of it."""
    option = find(key)
    return option is not None and option.part == "server"


def key_of_env(name: str) -> str:
    """Return the key that OPTION_X_Y or SERVING_X_Y means.

    SERVING_MIN_WORKERS means minWorkers. The name of an unknown key becomes lower case, if it is all upper case.
    """
    prefix, _, rest = name.partition("_")
    known = _BY_ENV_NAME.get(rest.replace("_", "").lower())
    if known is not None:
        return known
    lowered = rest.lower() if rest.isupper() else rest
    return f"option.{lowered}" if prefix == "OPTION" else lowered
