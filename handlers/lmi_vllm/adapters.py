"""LoRA adapters by name, and whose turn it is where base model and adapters must not run in one batch.

vLLM dies of a request whose adapter cannot be read, but survives `add_lora` of the same one: so every adapter is added
first and no other path ever reaches it. The number that vLLM knows an adapter by is never used twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from vllm.lora.request import LoRARequest

from handlers.base.sequence import Sequence
from handlers.lmi_vllm.engines import Engine
from lmi.errors import InvalidParameter, ModelUnusable, cause_line
from lmi.executor import Request

FOLDER = "adapters"  # beside the model's weights, one folder for each adapter, named as it is


class Adapters:
    """`add` and `remove` belong to the thread of the engine; the rest may be called from any."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loaded: dict[str, LoRARequest] = {}
        self._ids = count(1)

    def add(self, name: str, path: str) -> None:
        """Raises ModelUnusable with vLLM's reason."""
        if not isinstance(name, str) or not name or name in self._loaded:
            raise InvalidParameter("lora_config", "a new name, or removed first", name)
        if not (Path(path) / "adapter_config.json").is_file():
            raise ModelUnusable(f"{path}: an adapter's folder has an adapter_config.json")
        adapter = LoRARequest(name, next(self._ids), str(path))
        try:
            self._engine.add_adapter(adapter)
        except Exception as error:
            self._engine.remove_adapter(adapter.lora_int_id)  # it may have come half of the way
            raise ModelUnusable(f"{path}: vLLM cannot load this adapter: {cause_line(error)}") from error
        self._loaded[name] = adapter

    def add_all(self, model: str) -> None:
        """Those that lie beside the model."""
        for config in sorted(Path(model).glob(f"{FOLDER}/*/adapter_config.json")):
            self.add(config.parent.name, str(config.parent))

    def remove(self, name: str) -> None:
        """Requests that run with it finish; unknown names raise InvalidParameter."""
        if name not in self._loaded:
            raise InvalidParameter("lora_config", self._rule(), name)
        self._engine.remove_adapter(self._loaded.pop(name).lora_int_id)

    def check(self, request: Request) -> None:
        if request.lora_config is not None and request.lora_config.name not in self._loaded:
            raise InvalidParameter("lora_config", self._rule(), request.lora_config.name)

    def of(self, request: Request) -> LoRARequest | None:
        """Raises InvalidParameter for one that was removed meanwhile."""
        self.check(request)
        return None if request.lora_config is None else self._loaded[request.lora_config.name]

    def _rule(self) -> str:
        return f"one of the loaded adapters ({', '.join(sorted(self._loaded)) or 'there are none'})"


class Turns:
    """Sequences in the order they came, given out as long as they may run beside those that do.

    On a CPU vLLM computes wrong rows for the base model beside an adapter's: the two take turns there, and nobody
    overtakes, so nobody starves.
    """

    def __init__(self, *, is_needed: bool) -> None:
        self.held: deque[Sequence] = deque()
        self._is_needed = is_needed

    def take(self, running: dict[str, Sequence]) -> Iterator[Sequence]:
        """The next ones; each must be in `running` before the next is asked for, or have failed."""
        while self.held and self._may_run(self.held[0], running):
            yield self.held.popleft()

    def _may_run(self, sequence: Sequence, running: dict[str, Sequence]) -> bool:
        if not self._is_needed or not running:
            return True
        other = next(iter(running.values()))
        return (sequence.request.lora_config is None) == (other.request.lora_config is None)
