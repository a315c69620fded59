"""Additional outputs of a transformers model: what its modules give, by their paths.

`hidden_states` and `hidden_states.N` are other names of the base model and of its layers. Only the modules of declared
outputs are watched.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from transformers import PreTrainedModel

from handlers.lmi_dist.declared import HIDDEN_STATES, declared_names, layer_name
from handlers.lmi_dist.model import Step
from lmi.errors import BadConfiguration
from lmi.settings.config import EngineConfig


class ModuleOutputs:
    """What each declared module gave when it was called last."""

    def __init__(self, model: PreTrainedModel, num_layers: int, config: EngineConfig) -> None:
        """Raises BadConfiguration if the model has no module of a declared name."""
        modules = {path: module for path, module in model.named_modules() if path} | _hidden(model, num_layers)
        self.names = declared_names(config, modules)
        self._given: dict[str, object] = {}
        for name in self.names:
            modules[name].register_forward_hook(partial(self._note, name))

    def clear(self) -> None:
        """Forget the last step."""
        self._given.clear()

    def rows(self, name: str, step: Step) -> Tensor | None:
        """The wanted rows, (num_wanted, …), or None if the module did not give one for each token of the step."""
        given = self._given.get(name)
        if not isinstance(given, Tensor) or given.dim() < 2:
            return None
        if given.dim() > 2 and len(given) == 1:
            given = given[0]  # the only sequence of the step
        if len(given) == len(step.token_ids):
            return given.index_select(0, step.wanted)
        return given if len(given) == len(step.wanted) else None  # of the head, which is given only wanted rows

    def check(self, step: Step) -> None:
        """Raise BadConfiguration if a declared output had no rows in this step."""
        for name in self.names:
            if self.rows(name, step) is None:
                raise BadConfiguration(f"additional_outputs: {name} does not give a tensor with a row for each token")

    def _note(self, name: str, module: nn.Module, arguments: object, given: object) -> None:
        """Keep a module's output: a tensor, or the first of several."""
        first = given[0] if isinstance(given, tuple | list) and given else given
        self._given[name] = getattr(first, "last_hidden_state", first)


def _hidden(model: PreTrainedModel, num_layers: int) -> dict[str, nn.Module]:
    """The modules that give the hidden states: the base model, and the layers of its first list that has them all."""
    lists = [one for one in model.modules() if isinstance(one, nn.ModuleList) and len(one) == num_layers]
    layers = {layer_name(layer): module for layer, module in enumerate(lists[0])} if lists else {}
    return {HIDDEN_STATES: model.base_model, **layers}
