"""Any other decoder, run by the modules of transformers on the slots of the KV cache.

transformers calls `_attend` by its name, so the modules see one long ragged "sequence" and keep no
cache. A model is refused at load unless a few tokens, step by step, give the logits of the
untouched model. Adapters hang on its linears, by their paths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from handlers.lmi_dist.attention import StepInputs
from handlers.lmi_dist.config_file import KEEPS_ITS_OWN, unsupported
from handlers.lmi_dist.facts import ModelFacts
from handlers.lmi_dist.operations import Adapter, Attend
from handlers.lmi_dist.output_names import HIDDEN_STATES, declared_names, layer_name
from handlers.lmi_dist.placement import Placement, Weight
from handlers.lmi_dist.plan import Chunk, Plan
from handlers.lmi_dist.program import Module, Piece, Site
from handlers.lmi_dist.unused_tensors import tell_unused
from lmi.errors import ModelUnusable, error_line
from lmi.executor import Progress
from lmi.settings.config import EngineConfig

_NAME = "lmi_slots"
# The largest difference from the untouched model, as a share of the largest logit.
_TOLERANCES = {
    torch.float32: 1e-3,
    torch.float16: 0.05,
    torch.bfloat16: 0.1,
}
# The attribute of an attention module that holds `attend` of its model, for its layer.
_SITE = "lmi_attend"
_KINDS_OF_LAYERS = {"full_attention", "sliding_attention"}


class HuggingFaceModel:
    """A transformers model.

    Call it with a StepInputs for the logits of the wanted rows, (num_wanted, vocab_size).
    """

    def __init__(
        self,
        facts: ModelFacts,
        placement: Placement,
        pack: Callable[[Tensor], Weight],
        engine_config: EngineConfig,
        progress: Progress,
    ) -> None:
        config = facts.config
        self._step: StepInputs | None = None
        self._name = facts.name
        self._layer_types = getattr(config, "layer_types", None)
        self._window = getattr(config, "sliding_window", None)
        if self._layer_types and not set(self._layer_types) <= _KINDS_OF_LAYERS:
            raise unsupported(facts.path, f"{self._name} has layers of another kind")

        AttentionInterface.register(_NAME, _attend)
        transformers_logging.disable_progress_bar()
        progress("weights", 0.0)
        self._model = _load(facts, placement)
        progress("weights", 1.0)
        for module in self._model.modules():
            layer = getattr(module, "layer_idx", None)
            if isinstance(layer, int):
                setattr(module, _SITE, partial(self.attend, layer))

        self._token_ids = [(7 * index + 3) % config.vocab_size for index in range(9)]
        ids = torch.tensor([self._token_ids], device=self._model.device)
        try:
            self._model.set_attn_implementation("eager")
            # The logits of the untouched model, (num_token_ids, vocab_size).
            self._expected: Tensor = self._model(input_ids=ids, use_cache=False).logits[0].float()
            self._model.set_attn_implementation(_NAME)
        except Exception as error:
            raise ModelUnusable(f"{self._name} cannot be run: {error!r:.200}") from error

        pack_linears(self._model, pack)
        # What the module of each declared output gave when it was called last.
        self._outputs: dict[str, Any] = {}
        for name, module in output_modules(self._model, facts.num_layers, engine_config).items():
            module.register_forward_hook(partial(self._keep_output, name))

    def _keep_output(self, name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        self._outputs[name] = output

    def with_adapters(self) -> ModuleAdapters:
        """Let rows have adapters of any linear. Call it before `check`."""
        linears: dict[str, PackedLinear] = {}
        for path, module in self._model.named_modules():
            if isinstance(module, PackedLinear):
                linears[path] = module

        return ModuleAdapters(linears, lambda: self.step)

    def __call__(self, step: StepInputs) -> Tensor:
        self._step = step
        ids = step.token_ids[None]
        positions = step.positions[None]
        output = self._model(
            input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=step.wanted
        )
        logits: Tensor = output.logits[0]  # (num_wanted, vocab_size)
        return logits.float()

    def output(self, name: str) -> Tensor:
        """The wanted rows of a declared output in the last step, (num_wanted, hidden_size)."""
        output = self._outputs[name]
        if isinstance(output, tuple):
            output = output[0]

        if not isinstance(output, Tensor):
            output = output.last_hidden_state

        states: Tensor = output  # (1, rows, hidden_size)
        return states[0].index_select(0, self.step.wanted)

    @property
    def step(self) -> StepInputs:
        assert self._step is not None, "attention is asked for outside of a step"
        return self._step

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, _mask: object, **options: Any
    ) -> Tensor:
        """Store keys and values (1, kv_heads, rows, d), and attend: (1, heads, rows, d) to (1,
        rows, heads, d).

        Behind the layer are the arguments that transformers gives an attention function.
        """
        window = options.get("sliding_window")
        if self._layer_types is not None:
            is_sliding = self._layer_types[layer] == "sliding_attention"
            window = self._window if is_sliding else None

        attention = self.step.attention
        queries = query[0].transpose(0, 1)
        attention.write(layer, torch.cat((key[0], value[0])).transpose(0, 1))
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        # Its buffers are not used: it belongs to no program.
        operation = Attend(0, 0, layer, scale, options.get("softcap"), window)
        answer = attention(queries, operation)
        return answer.view(1, len(answer), -1, query.shape[-1])

    def check(self, forward: Callable[[Plan], Tensor]) -> None:
        """Compare a prompt chunk and three decodes in slot 0 with the untouched model.

        `forward` gives logits (num_logits, vocab_size).
        """
        prompt = Chunk(0, 0, self._token_ids[:6], 6)
        plans = [Plan([], [prompt])]
        for index in (6, 7, 8):
            decode = Chunk(0, index, [self._token_ids[index]])
            plans.append(Plan([decode], []))

        # The model's code can raise any error when it is used in this way.
        try:
            logits = torch.cat([forward(plan) for plan in plans])
        except Exception as error:
            why = f"it does not run on slots of keys and values ({error!r:.200})"
            raise unsupported(self._name, why) from error

        tolerance = _TOLERANCES[self._model.dtype] * float(self._expected.abs().max())
        if not torch.allclose(logits, self._expected, rtol=0.0, atol=tolerance):
            raise unsupported(self._name, "it does more than attend to keys and values")


def _load(facts: ModelFacts, placement: Placement) -> PreTrainedModel:
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            facts.path,
            config=facts.config,
            dtype=placement.dtype,
            attn_implementation=_NAME,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:
        # transformers raises a different type for each obstacle. A KeyError with our name means
        # that the model has its own table of attentions.
        if isinstance(error, KeyError) and error.args == (_NAME,):
            raise unsupported(facts.path, f"{facts.name} {KEEPS_ITS_OWN}") from error

        why = f"{facts.name} cannot be loaded: {error_line(error)}"
        raise ModelUnusable(f"{facts.path}: {why}") from error

    # It is a pair, with output_loading_info.
    model, info = cast("tuple[PreTrainedModel, dict[str, set[str]]]", loaded)
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelUnusable(f"{facts.path}: tensor {missing[0]} is missing from its weight files")

    tell_unused(facts.path, info["unexpected_keys"])
    model.eval().to(placement.device)
    return model


def _attend(module: nn.Module, *arguments: Any, **options: Any) -> tuple[Tensor, None]:
    """The attention function of transformers: see `HuggingFaceModel.attend`."""
    return getattr(module, _SITE)(*arguments, **options), None


class PackedLinear(nn.Module):
    """A linear with a packed weight, as the module that transformers expects."""

    def __init__(self, linear: nn.Linear, pack: Callable[[Tensor], Weight]) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._weight = pack(linear.weight.detach())
        self._bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """(…, in_features) to (…, out_features)."""
        y = self._weight(x.reshape(-1, self.in_features), self._bias)
        return y.view(*x.shape[:-1], self.out_features)


def pack_linears(model: nn.Module, pack: Callable[[Tensor], Weight]) -> None:
    """Put a PackedLinear in the place of each linear."""
    for name, child in model.named_children():
        if type(child) is nn.Linear:
            setattr(model, name, PackedLinear(child, pack))
        else:
            pack_linears(child, pack)


class ModuleAdapters:
    def __init__(self, linears: Mapping[str, PackedLinear], step: Callable[[], StepInputs]) -> None:
        """`linears` are modules by their paths; `step` gives the current step."""
        self._linears = list(linears.items())
        self._step = step
        self._adapters: dict[int, Adapter[Tensor]] = {}
        # By site: whether it saw the rows of a step whenever it was called.
        self._is_regular: dict[int, bool] = {}
        for site, module in enumerate(linears.values()):
            module.register_forward_hook(partial(self._add, site))

    def put_adapter(self, number: int, adapter: Adapter[Tensor]) -> None:
        self._adapters[number] = adapter

    def drop_adapter(self, number: int) -> None:
        self._adapters.pop(number, None)

    def sites(self) -> tuple[Site, ...]:
        """A site for each linear; adapters can change those that have been called and
        are regular.
        """
        sites = []
        for site, (path, linear) in enumerate(self._linears):
            num_in = linear.in_features
            num_out = linear.out_features
            modules: tuple[Module, ...] = ()
            if self._is_regular.get(site, False):
                modules = (Module(path, num_in, (Piece(0, num_out, 0),)),)

            sites.append(Site(num_in, num_out, modules))

        return tuple(sites)

    def _add(
        self, site: int, linear: PackedLinear, arguments: tuple[Tensor, ...], y: Tensor
    ) -> None:
        """Add to the output (1, rows, out_features) of a linear, which was just called with (1,
        rows, in_features).
        """
        if not arguments:
            # It was called by keyword, and is not known to be regular.
            return

        x = arguments[0]
        step = self._step()
        num_rows = x.shape[1] if x.dim() == 3 and len(x) == 1 else -1
        is_regular = num_rows in (len(step.token_ids), len(step.wanted))
        self._is_regular[site] = is_regular and self._is_regular.get(site, True)
        if not is_regular:
            return

        has_all_rows = num_rows == len(step.token_ids)
        for adapted in step.adapted:
            weights = self._adapters[adapted.adapter][site]
            rows = adapted.rows if has_all_rows else adapted.wanted
            if weights is not None and weights.up is not None:
                low = functional.linear(x[0].index_select(0, rows), weights.down)
                y[0].index_add_(0, rows, functional.linear(low, weights.up))


def output_modules(
    model: PreTrainedModel, num_layers: int, config: EngineConfig
) -> dict[str, nn.Module]:
    """The module that gives each declared output.

    Raises BadConfiguration if the model has no output of a name.
    """
    modules: dict[str, nn.Module] = {HIDDEN_STATES: model.base_model}
    for layers in model.modules():
        # The first such list has all layers.
        if isinstance(layers, nn.ModuleList) and len(layers) == num_layers:
            for layer, module in enumerate(layers):
                modules[layer_name(layer)] = module

            break

    return {name: modules[name] for name in declared_names(config, modules)}
