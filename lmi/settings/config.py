"""The settings of a server, which all its processes share. The supervisor hands them to its children as JSON.

The default of an option is the default of its field, unless the engine's `Handler` has a different one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from lmi.settings import annexes
from lmi.settings.engine_config import EngineConfig as EngineConfig
from lmi.settings.kinds import NAME, NAMES, integer
from lmi.settings.option import option
from lmi.settings.server_config import ServerConfig as ServerConfig
from lmi.user_code.options import FormsConfig, RequirementsConfig, UserCodeConfig


@dataclass(frozen=True, slots=True)
class SamplingValues:
    """Values of parameters of the LMI APIs. A top_k of 0 is no limit."""

    temperature: float
    top_k: int
    top_p: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """The values of what an LMI request leaves out, with `do_sample: true` and without it.

    An engine that has them chooses by top_k and top_p: if both are 0, decoding is greedy; otherwise one that is 0 is no
    limit.
    """

    with_do_sample: SamplingValues
    without: SamplingValues


@dataclass(frozen=True, kw_only=True)
class ModelConfig(annexes.NamingConfig, FormsConfig, annexes.PromptsConfig):
    """The model as clients see it. `path` is a local folder."""

    path: str
    adapters: dict[str, str] = field(default_factory=dict)  # the folders of the LoRA adapters beside it, by name
    version: str = "1"
    dynamic_batch: bool = False  # option.rolling_batch=disable
    sampling_defaults: SamplingDefaults | None = None  # the engine's; None: greedy unless do_sample, without limits

    required_memory_mb: int | None = option(None, integer(0), key="required_memory_mb")
    """MB of memory that one of several models needs; nothing: estimated from its files"""
    model_id: ClassVar[str | None] = option(None, names="option.model HF_MODEL_ID", is_path=True)
    """a folder, OWNER/NAME of a hub, s3://BUCKET/PREFIX or demo; nothing: the folder of serving.properties itself"""
    revision: str | None = option(None, names="HF_REVISION", is_for_engine=True)
    """branch, tag or commit of a model from a hub; nothing: main"""
    name: str = option("", NAME, key="option.model_name")
    """name in URLs and answers; nothing: the folder's name"""
    aliases: tuple[str, ...] = option((), NAMES, key="option.model_alias")
    """further names of the model in URLs"""

    @property
    def names(self) -> tuple[str, ...]:
        """All names that a request may have for this model. `model` is always one of them."""
        return tuple(dict.fromkeys((self.name, "model", *self.aliases)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    server: ServerConfig
    model: ModelConfig
    engine: EngineConfig
    user_code: UserCodeConfig | None = None
    requirements: RequirementsConfig | None = None  # None: nothing is installed

    @property
    def is_user_code(self) -> bool:
        """Whether user code is the model. It then runs in place of the engines."""
        return self.user_code is not None and self.user_code.handler is not None

    @property
    def num_formatters(self) -> int:
        """The number of processes that run the formatters of user code."""
        return 0 if self.user_code is None or self.is_user_code else 1
