"""The model on its device, run with torch: it owns weights and cache slots, and turns a plan into tensors and logits.

The process must set OMP_NUM_THREADS before it imports torch, and always GOMP_SPINCOUNT=1000, without which two threads
beside one busy process are ten times slower.
"""

import torch
from torch import Tensor

from handlers.lmi_dist.about import LoraLimits
from handlers.lmi_dist.attention import Attention, KvSlots
from handlers.lmi_dist.facts import ModelFacts
from handlers.lmi_dist.hf_fallback import HuggingFaceModel
from handlers.lmi_dist.lora import Adaptable, AnyLoader, LoraLoader
from handlers.lmi_dist.placement import Placement, packer, to_array, to_tensor
from handlers.lmi_dist.program import load, sites_of
from handlers.lmi_dist.runner import Plan
from handlers.lmi_dist.torch_model import AdaptedRows, StepInputs, TorchModel
from handlers.lmi_dist.weights import BFLOAT16, Array, Checkpoint
from lmi.errors import BadConfiguration
from lmi.executor import Progress
from lmi.settings.config import EngineConfig


class ModelRunner:
    """One model replica. Not safe to call from two threads at once."""

    kernels, is_batch_invariant, tokens_per_block = "torch", False, 16

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
        if config.quantize is not None:
            why = "only the native kernels have it, and torch runs"
            raise BadConfiguration(f"option.quantize={config.quantize}: {why}")
        self.vocab_size, self.context_length = facts.vocab_size, facts.context_length
        self.dtype, self.device = str(placement.dtype).removeprefix("torch."), str(placement.device)
        self._device, self.pooling = placement.device, facts.pooling
        pack, limits = packer(placement), LoraLimits.of(config.options)
        self._model: TorchModel | HuggingFaceModel
        adaptable: Adaptable[Tensor] | None

        def place(array: Array) -> Tensor:
            dtype = torch.bfloat16 if array.dtype == BFLOAT16 else placement.dtype
            return to_tensor(array).to(placement.device, dtype)

        with torch.inference_mode():
            self.slots = KvSlots(facts, placement, num_slots, max_length)
            if facts.architecture is not None:
                program = load(facts, config, max_length, progress, lambda weight: pack(to_tensor(weight)), place)
                self._model = adaptable = TorchModel(program, placement.dtype)
                sites = sites_of(facts.architecture)
            else:  # the modules of transformers run it
                Checkpoint(facts.path, allow_pickle=config.allow_pickle)  # refuses pickles
                self._model = decoder = HuggingFaceModel(facts, placement, pack, config, progress)
                adaptable = modules = None if limits is None else decoder.with_adapters()
                decoder.check(lambda plan: decoder(self._prepare(plan)))
                self.slots.release(0)
                sites = () if modules is None else modules.sites()
        self.adapters: AnyLoader | None = None
        if limits is not None and adaptable is not None:
            self.adapters = LoraLoader(facts, config, limits, sites, adaptable, lambda: place)

    @torch.inference_mode()
    def forward(self, plan: Plan) -> Array:
        try:
            return to_array(self._model(self._prepare(plan)).cpu())
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise

    def output(self, name: str) -> Array:
        return to_array(self._model.output(name).float().cpu())

    def _prepare(self, plan: Plan) -> StepInputs:
        token_ids, positions, slots, wanted = list[int](), list[int](), list[int](), list[int]()
        users: dict[int, tuple[list[int], list[int]]] = {}  # by adapter: rows, and places among the wanted rows
        for chunk in plan.chunks:
            if chunk.adapter:
                rows, places = users.setdefault(chunk.adapter, ([], []))
                rows += range(len(token_ids), len(token_ids) + len(chunk.token_ids))
                places += range(len(wanted), len(wanted) + chunk.num_logits)
            token_ids += chunk.token_ids
            positions += range(chunk.start, chunk.end)
            slots += [chunk.slot] * len(chunk.token_ids)
            wanted += range(len(token_ids) - chunk.num_logits, len(token_ids))
        tokens = torch.tensor((token_ids, positions, slots), device=self._device)
        return StepInputs(
            token_ids=tokens[0],
            positions=tokens[1],
            wanted=self._indices(wanted),
            attention=Attention(self.slots, plan, self.slots.cell_indices(tokens[2], tokens[1])),
            adapted=tuple(AdaptedRows(adapter, *map(self._indices, rows)) for adapter, rows in users.items()),
        )

    def _indices(self, rows: list[int]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self._device)
