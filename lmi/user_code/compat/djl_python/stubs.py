"""Stubs for modules of the reference that lmi replaces: its services around engines.

Files import these modules and often use nothing from them. So any name can be imported, and a class
can be instantiated and inherited from. Using it, or calling a function, raises NotHere with one
sentence that says what is missing.
"""

import sys
from types import ModuleType
from typing import Any

SERVICE = "lmi serves models by its own engines, which option.rolling_batch names"
NEURON = "lmi does not run on AWS Neuron"
OPTIONS = "lmi reads the options itself; an input formatter is given them as `properties`"
SESSIONS = (
    "lmi opens and closes the sessions of its own engines, and SessionManager those of a "
    "model's own code"
)

# The modules of `djl_python` that are not here, by the reason. A package comes before its modules.
MODULES_BY_REASON: dict[str, tuple[str, ...]] = {
    SERVICE: (
        "huggingface",
        "deepspeed",
        "fastertransformer",
        "tensorrt_llm",
        "tensorrt_llm_python",
        "streaming_utils",
        "chat_completions",
        "chat_completions.chat_utils",
        "lmi_vllm",
        "lmi_vllm.vllm_async_service",
        "lmi_vllm.request_response_utils",
        "lmi_trtllm",
        "lmi_trtllm.trtllm_async_service",
        "lmi_trtllm.request_response_utils",
        "rolling_batch",
        "rolling_batch.rolling_batch",
        "rolling_batch.lmi_dist_rolling_batch",
        "rolling_batch.rolling_batch_vllm_utils",
        "rolling_batch.scheduler_rolling_batch",
        "rolling_batch.trtllm_rolling_batch",
        "rolling_batch.vllm_rolling_batch",
    ),
    NEURON: (
        "transformers_neuronx",
        "stable_diffusion_inf2",
        "neuron_utils",
        "neuron_utils.model_loader",
        "neuron_utils.utils",
        "rolling_batch.neuron_rolling_batch",
    ),
    OPTIONS: (
        "properties_manager",
        "properties_manager.properties",
        "properties_manager.ds_properties",
        "properties_manager.hf_properties",
        "properties_manager.lmi_dist_rb_properties",
        "properties_manager.scheduler_rb_properties",
        "properties_manager.sd_inf2_properties",
        "properties_manager.tnx_properties",
        "properties_manager.trt_properties",
        "properties_manager.vllm_rb_properties",
    ),
    SESSIONS: ("session_utils",),
    "it is part of djl-serving itself": (
        "custom_formatter_handling",
        "custom_handler_service",
        "request",
        "service_loader",
        "test_model",
        "utils",
    ),
    "lmi does not serve models of scikit-learn": ("sklearn_handler",),
    "lmi does not serve models of XGBoost": ("xgboost_handler",),
    "lmi does not write tensors as ndlist, use add_as_numpy or add_as_npz": ("np_util",),
}


class NotHere(NotImplementedError, AttributeError):
    """Code used a part of the reference that lmi does not have. An AttributeError, so that hasattr
    returns False.
    """


class _StubClass(type):
    """The class of classes whose attributes cannot be used."""

    def __getattr__(cls, name: str) -> Any:
        raise _fault(cls, name)


class Stub(metaclass=_StubClass):
    """Replaces a class or function of the reference."""

    # The message of NotHere.
    sentence = ""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise _fault(type(self), name)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        raise _fault(type(self), "__call__")

    # A subclass in the file calls it by super().
    def initialize(self, *args: Any, **keywords: Any) -> Any:
        raise _fault(type(self), "initialize")

    inference = initialize


class StubModule(ModuleType):
    """Has every attribute except dunder names; a capitalised name is a class."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__} has no attribute {name}")

        sentence = f"{self.__name__}.{name} is not here: {self._reason}"
        kind = _StubClass(name, (Stub,), {"__module__": self.__name__, "sentence": sentence})
        stub = kind if name[0].isupper() else kind()
        setattr(self, name, stub)
        return stub


def install(package: str) -> None:
    """Make all stub modules importable below `package`."""
    for reason, names in MODULES_BY_REASON.items():
        for name in names:
            module = StubModule(f"{package}.{name}", reason)
            sys.modules[module.__name__] = module
            parent, _, last_name = module.__name__.rpartition(".")
            setattr(sys.modules[parent], last_name, module)


def _fault(stub: Any, name: str) -> AttributeError:
    # Python itself looks for such names.
    if name.startswith("__") and name != "__call__":
        return AttributeError(name)

    return NotHere(stub.sentence)
