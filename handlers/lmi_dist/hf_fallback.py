"""Any other decoder, run by the modules of transformers on the slots of the KV cache.

transformers calls `_attend` by its name, so the modules see one long ragged "sequence" and keep no
cache. A model is refused at load unless a few tokens, step by step, give the logits of the
untouched model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from handlers.lmi_dist.config_file import KEEPS_ITS_OWN, unsupported
from handlers.lmi_dist.facts import ModelFacts
from handlers.lmi_dist.module_adapters import ModuleAdapters
from handlers.lmi_dist.operations import Attend
from handlers.lmi_dist.output_names import HIDDEN_STATES, declared_names, layer_name
from handlers.lmi_dist.packed_linears import PackedLinear, pack_linears
from handlers.lmi_dist.placement import Placement, Weight
from handlers.lmi_dist.plan import Chunk, Plan
from handlers.lmi_dist.step_inputs import StepInputs
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
_ATTEND_ATTRIBUTE = "lmi_attend"
_KINDS_OF_LAYERS = {"full_attention", "sliding_attention"}


class HuggingFaceModel:
    """A model of transformers on our slots of keys and values.

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
        """Load a model. Raises ModelUnusable, or BadConfiguration for an output that it lacks."""
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
        self._take_over_attention()

        self._token_ids = [(7 * index + 3) % config.vocab_size for index in range(9)]
        self._expected = self._untouched_logits()
        pack_linears(self._model, pack)

        # What the module of each declared output gave when it was called last.
        self._outputs: dict[str, Any] = {}
        for name, module in output_modules(self._model, facts.num_layers, engine_config).items():
            module.register_forward_hook(partial(self._keep_output, name))

    def _take_over_attention(self) -> None:
        """Give each module of a layer what `_attend` calls."""
        for module in self._model.modules():
            layer = getattr(module, "layer_idx", None)
            if isinstance(layer, int):
                setattr(module, _ATTEND_ATTRIBUTE, partial(self.attend, layer))

    def _untouched_logits(self) -> Tensor:
        """Return the logits of our tokens by the attention of transformers, float32
        (num_token_ids, vocab_size).
        """
        ids = torch.tensor([self._token_ids], device=self._model.device)
        try:
            self._model.set_attn_implementation("eager")
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0].float()
            self._model.set_attn_implementation(_NAME)
        except Exception as error:
            raise ModelUnusable(f"{self._name} cannot be run: {error!r:.200}") from error

        return logits

    def _keep_output(self, name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        self._outputs[name] = output

    def with_adapters(self) -> ModuleAdapters:
        """Let rows have adapters of any linear, and return where they are put. Call it before
        `check`.
        """
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
        """Return the wanted rows of a declared output in the last step, (num_wanted,
        hidden_size).
        """
        output = self._outputs[name]
        if isinstance(output, tuple):
            output = output[0]

        if not isinstance(output, Tensor):
            output = output.last_hidden_state

        states: Tensor = output  # (1, rows, hidden_size)
        return states[0].index_select(0, self.step.wanted)

    @property
    def step(self) -> StepInputs:
        """The step that is computed, or was computed last."""
        assert self._step is not None, "attention is asked for outside of a step"
        return self._step

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, _mask: object, **options: Any
    ) -> Tensor:
        """Store keys and values (1, kv_heads, rows, head_dim), and attend: (1, heads, rows,
        head_dim) to (1, rows, heads, head_dim).

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
        # It belongs to no program: nobody reads its buffers.
        operation = Attend(
            input=0,
            output=0,
            layer=layer,
            scale=scale,
            softcap=options.get("softcap"),
            window=window,
        )
        answer = attention(queries, operation)
        return answer.view(1, len(answer), -1, query.shape[-1])

    def check(self, forward: Callable[[Plan], Tensor]) -> None:
        """Compare a prompt chunk and three decodes in slot 0 with the untouched model.

        `forward` gives logits (num_logits, vocab_size). Raises ModelUnusable if they differ.
        """
        num_prompt_tokens = len(self._token_ids) - 3
        prompt = Chunk(0, 0, self._token_ids[:num_prompt_tokens], num_prompt_tokens)
        plans = [Plan([], [prompt])]
        for index in range(num_prompt_tokens, len(self._token_ids)):
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
    """Return the model with its weights on the device. Raises ModelUnusable."""
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
    return getattr(module, _ATTEND_ATTRIBUTE)(*arguments, **options), None


def output_modules(
    model: PreTrainedModel, num_layers: int, config: EngineConfig
) -> dict[str, nn.Module]:
    """Return the module that gives each declared output, by its name.

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
