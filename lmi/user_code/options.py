"""The options of user code and of the form of answers, and the configuration of the model's own
code.
"""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

from msgspec import Struct

from lmi.settings.kinds import BOOLEAN, Kind, choice, matching, word
from lmi.settings.option import SCRIPTS, Settings, option

# The operator's words for pip, which take the place of a model's requirements.txt.
PIP_ARGS = "STANDARD_PIP_ARGS"
FUNCTION = matching(
    "the name of a function in the model's own model.py", r"[A-Za-z_][A-Za-z0-9_]{0,127}"
)
FORMATTER_WORDS = ("json", "jsonlines", "sse")
FORMATTER = Kind(
    "json, jsonlines, sse, or a function in the model's own model.py",
    word({name: name for name in FORMATTER_WORDS}, FUNCTION.parse),
    words=FORMATTER_WORDS,
)
# The reference's own streamer, or transformers'.
STREAMING = Kind("true, false", word({"huggingface": True}, BOOLEAN.parse), words=("true", "false"))


class FormsConfig(Settings):
    """The form of answers."""

    output_formatter: str | None = option(
        None, FORMATTER, refused_by=SCRIPTS, harmless=FORMATTER_WORDS.__contains__
    )
    """form of answers, or a function for it"""
    input_formatter: ClassVar = option(None, FUNCTION, refused_by=SCRIPTS)
    """function of model.py that reads requests"""
    tgi_compat: bool = option(False)
    """answers in the shape of TGI"""
    enable_streaming: bool = option(False, STREAMING)
    """answers of option.rolling_batch=disable as they come, as jsonlines"""


def is_built_in(entry: str) -> bool:
    """Whether an entry point is one of the reference."""
    return entry.startswith("djl_python.")


ENTRY_POINT = matching(
    "a Python file in the model's folder, or djl_python.…",
    r"djl_python\.[A-Za-z0-9_.-]+|[^\0]+\.py",
)
ENGINE = Kind(
    "Python or MPI; what runs the model is option.rolling_batch (auto, vllm, trtllm, lmi-dist)",
    choice("Python", "MPI").parse,
)


class UserCodeOptions(Settings):
    """The model's own code, and what it is for."""

    engine: ClassVar = option(None, ENGINE, key="engine", has_flag=False)
    """accepted, means nothing"""
    entry_point: ClassVar = option(
        None,
        ENTRY_POINT,
        key="option.entryPoint",
        names="DJL_ENTRY_POINT",
        is_path=True,
        refused_by=SCRIPTS,
        harmless=is_built_in,
    )
    """Python file whose function handle is the model; djl_python.… means nothing"""
    task: ClassVar[str | None] = option(None, names="HF_TASK", has_flag=False)
    """what the model is for: text, text of images where the engine reads them, or embeddings; all
    else is refused
    """
    handler_function: ClassVar = option(None, FUNCTION, key="option.handler", refused_by=SCRIPTS)
    """the function of entryPoint, instead of handle"""
    adapter_code: ClassVar[bool] = option(
        False,
        refused_by=SCRIPTS,
        grants="Python code that comes with adapters",
    )
    """run the formatters in the model.py of an adapter"""


class UserCodeConfig(Settings):
    """A file of user code. A file with a `handler` is the model; another file holds formatters for
    a model, or with a `standards_folder` the handlers of AWS's model-hosting-container-standards.

    A formatter whose name is "" is the function with djl_python's decorator.
    """

    path: str
    handler: str | None = None
    output_formatter: str | None = None
    input_formatter: str | None = None
    # Where the standards' package looks for files, "" if the code is not for it.
    standards_folder: str = ""
    # Whether adapters may have formatters of their own. `path` is "" if only they have any.
    runs_adapters: bool = False
    # The properties of the handler's first call.
    properties: dict[str, str] = field(default_factory=dict)


class RequirementsConfig(Struct, frozen=True, kw_only=True):
    """A requirements.txt of the model, and the folder that what it names is installed in.

    With `has_words` the operator's words for pip, which may hold a password and are in the
    environment alone, take the place of the file, and pip runs in its folder.
    """

    file: str
    folder: str
    has_words: bool = False

    @property
    def label(self) -> str:
        """What messages call that which names the packages."""
        return PIP_ARGS if self.has_words else self.file
