"""The model on its device: it takes a plan of the scheduler and returns logits.

The runner owns the weights and the cache slots, and turns chunks of token ids into tensors. With batch invariance on a
CPU every product has at least two rows (see `linear`), and attention uses only shapes of a grid (see `attention`,
`invariance`). So the bits of a sequence do not depend on its neighbours. The runner knows nothing of requests, sampling
or budgets.

The process must set OMP_NUM_THREADS before it imports torch, and always GOMP_SPINCOUNT=1000, without which two threads
beside one busy process are ten times slower.
"""

from __future__ import annotations

import logging
from functools import partial

import torch
from torch import Tensor

from handlers.lmi_dist.attention import Attention, Grid, View, query_counts
from handlers.lmi_dist.decoder import Decoder
from handlers.lmi_dist.hf_fallback import HuggingFaceModel
from handlers.lmi_dist.invariance import find_grid, layers_agree
from handlers.lmi_dist.kv_slots import KvSlots
from handlers.lmi_dist.linear import LinearBuilder
from handlers.lmi_dist.model import Model, StepTensors
from handlers.lmi_dist.placement import Placement
from handlers.lmi_dist.plan import Plan
from handlers.lmi_dist.weights import Checkpoint, ModelFacts
from lmi.executor import Progress
from lmi.settings.config import EngineConfig

log = logging.getLogger(__name__)

_NUM_CHECKED_SLOTS, _CHECKED_LENGTH = 17, 700


class ModelRunner:
    """One model replica. Not safe to call from two threads at once."""

    def __init__(
        self,
        facts: ModelFacts,
        placement: Placement,
        config: EngineConfig,
        *,
        num_slots: int,
        max_length: int,
        progress: Progress = lambda stage, share: None,
    ) -> None:
        if max_length > facts.context_length:
            raise ValueError(f"max_length must be at most {facts.context_length}, given {max_length}")
        self.vocab_size, self.context_length = facts.vocab_size, facts.context_length
        self.dtype, self.device = str(placement.dtype).removeprefix("torch."), str(placement.device)
        self._device, self._num_slots, self._max_length = placement.device, num_slots, max_length
        with torch.inference_mode():
            found = _find_grid(facts, placement, config)
            grid = found or Grid(query_counts(facts.group)[0])
            self.kv = _new_cache(facts, placement, grid, num_slots, max_length)
            self._attention = Attention(self.kv, grid, facts.group, is_paired=found is not None)
            self._model = self._load(facts, placement, config, progress)
            self.is_batch_invariant = self._attention.is_paired and self._layers_agree()

    def _load(self, facts: ModelFacts, placement: Placement, config: EngineConfig, progress: Progress) -> Model:
        """Load the generic decoder if it knows the architecture, else the modules of transformers."""
        build = LinearBuilder(placement.device, placement.dtype, config.quantize, self._attention.is_paired)
        checkpoint = Checkpoint(facts.path, allow_pickle=config.allow_pickle, progress=progress)  # refuses pickles
        if facts.architecture is not None:
            return Decoder(facts.architecture, checkpoint, build, self._attention, self._max_length)
        model = HuggingFaceModel(facts, build, self._attention, progress)
        model.check(lambda plan: self._run(model, plan))
        model.pack(build)
        self.release(0)
        return model

    @torch.inference_mode()
    def forward(self, plan: Plan) -> Tensor:
        """Run one step. Returns logits, float32 (num_logits, vocab_size).

        They are in the order of the chunks and of the wanted positions of each chunk.
        """
        return self._run(self._model, plan)

    def _run(self, model: Model, plan: Plan) -> Tensor:
        """Run one step of `model`. Returns logits (num_logits, vocab_size), as `forward` does."""
        num_wanted = sum(chunk.num_logits for chunk in plan.chunks)
        return model(self._prepare(plan))[:num_wanted]

    @torch.inference_mode()
    def copy(self, slot: int, to_slots: list[int], num_tokens: int) -> None:
        """Copy the keys and values of the first `num_tokens` of a slot to other slots, bit by bit."""
        self.kv.copy(slot, to_slots, num_tokens)

    def release(self, slot: int) -> None:
        """Free the slot. Its memory goes back to the system where that is possible."""
        self.kv.release(slot)

    def _prepare(self, plan: Plan) -> StepTensors:
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        wanted: list[int] = []
        for chunk in plan.chunks:
            token_ids += chunk.token_ids
            positions += range(chunk.start, chunk.end)
            slots += [chunk.slot] * len(chunk.token_ids)
            wanted += range(len(token_ids) - chunk.num_logits, len(token_ids))
        num_tokens = len(token_ids)
        if self._attention.is_paired:
            _pair(token_ids, positions, slots)
            _pair(wanted)
        tokens = torch.tensor((token_ids, positions, slots), device=self._device)
        return StepTensors(
            token_ids=tokens[0],
            positions=tokens[1],
            num_tokens=num_tokens,
            cells=self.kv.cell_indices(tokens[2, :num_tokens], tokens[1, :num_tokens]),
            views=_Views(self._attention, plan, len(token_ids)),
            wanted=torch.tensor(wanted, dtype=torch.int64, device=self._device),
            queries=self._attention.new_queries(len(token_ids)),
        )

    def _layers_agree(self) -> bool:
        """Whether the loaded layers give a sequence the same bits beside any neighbours."""
        assert isinstance(self._model, Decoder)  # see _find_grid
        num_slots = min(_NUM_CHECKED_SLOTS, self._num_slots)
        length = min(_CHECKED_LENGTH, self._max_length)
        self.kv.randomize(num_slots, length)
        few_layers = partial(self._model, layers=self._model.kinds())
        agree = layers_agree(lambda plan: self._run(few_layers, plan), num_slots, length, self.vocab_size)
        for slot in range(num_slots + 1):
            self.kv.release(slot)
        log.log(
            logging.INFO if agree else logging.WARNING,
            "answers %s on their neighbours in the batch, down to the last bit (threads: %d)",
            "do not depend" if agree else "may depend",
            torch.get_num_threads(),
        )
        log.debug("attention is computed on %s", self._attention.grid)
        return agree


class _Views(dict[int | None, View]):
    """The View of each window in one step, computed when a layer first needs it."""

    def __init__(self, attention: Attention, plan: Plan, num_tokens: int) -> None:
        super().__init__()
        self._attention, self._plan, self._num_tokens = attention, plan, num_tokens

    def __missing__(self, window: int | None) -> View:
        self[window] = view = self._attention.plan(self._plan, self._num_tokens, window)
        return view


def _pair(*columns: list[int]) -> None:
    """Repeat the only row of each column: a single row may round differently than in a batch."""
    for column in columns:
        if len(column) == 1:
            column.append(column[0])


def _find_grid(facts: ModelFacts, placement: Placement, config: EngineConfig) -> Grid | None:
    """The attention shapes that make batches invariant, or None if invariance is not wanted or not known.

    It is known for the generic decoder in float32 on a CPU. Capped scores need matrix products that break it.
    """
    is_plain = placement.device.type == "cpu" and placement.dtype == torch.float32 and config.quantize is None
    is_known = facts.architecture is not None and facts.architecture.softcap is None
    if not (config.batch_invariant and is_plain and is_known):
        return None
    return find_grid(facts.num_kv_heads, facts.group, facts.head_dim)


def _new_cache(facts: ModelFacts, placement: Placement, grid: Grid, num_slots: int, max_length: int) -> KvSlots:
    return KvSlots(
        num_slots=num_slots + 1,  # a single decode is computed together with the neighbouring slot
        num_layers=facts.num_layers,
        num_heads=facts.num_kv_heads,
        max_length=grid.length(max_length),
        head_dim=facts.head_dim,
        dtype=placement.dtype,
        device=placement.device,
    )
