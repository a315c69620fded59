"""The runner of a model with torch: on CUDA, and on a CPU that the native kernels do not know.

The process must set OMP_NUM_THREADS before it imports torch, and always
GOMP_SPINCOUNT=1000, without which two threads beside one busy process are ten times slower.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from handlers.lmi_dist.arrays import BFLOAT16, Array
from handlers.lmi_dist.attention import Attention
from handlers.lmi_dist.facts import ModelFacts
from handlers.lmi_dist.hf_fallback import HuggingFaceModel
from handlers.lmi_dist.kv_slots import KvSlots
from handlers.lmi_dist.limits import Limits
from handlers.lmi_dist.linear_sites import Site, sites_of
from handlers.lmi_dist.lora import Adaptable, AnyLoader, LoraLoader
from handlers.lmi_dist.lora_limits import LoraLimits
from handlers.lmi_dist.placement import Placement, packer, to_array, to_tensor
from handlers.lmi_dist.plan import Plan
from handlers.lmi_dist.program import load
from handlers.lmi_dist.step_inputs import AdaptedRows, StepInputs
from handlers.lmi_dist.torch_model import TorchModel
from handlers.lmi_dist.weights import Checkpoint
from lmi.executor import Progress
from lmi.settings.config import EngineConfig


@dataclass(slots=True)
class _UsersOfAdapter:
    """The rows of a step that have one adapter."""

    rows: list[int] = field(default_factory=list)
    # Their places among the wanted rows.
    places: list[int] = field(default_factory=list)


class ModelRunner:
    """One model replica: see `Runner`. Not safe to call from two threads at once."""

    kernels = "torch"
    is_batch_invariant = False
    tokens_per_block = 16
    memory = None
    weight_bytes = None

    def __init__(
        self,
        facts: ModelFacts,
        placement: Placement,
        config: EngineConfig,
        limits: Limits,
        progress: Progress,
    ) -> None:
        """Load a model. Raises ModelUnusable for one that cannot run here, and SecurityRefused for
        pickled weights that are not allowed.
        """
        self.vocab_size = facts.vocab_size
        self.context_length = facts.context_length
        self.dtype = str(placement.dtype).removeprefix("torch.")
        self.device = str(placement.device)
        self._device = placement.device
        self.pooling = facts.pooling

        self._model: TorchModel | HuggingFaceModel
        adaptable: Adaptable[Tensor] | None = None
        sites: tuple[Site, ...] = ()
        lora = LoraLimits.of(config.options)
        pack = packer(placement)

        def place(array: Array) -> Tensor:
            dtype = torch.bfloat16 if array.dtype == BFLOAT16 else placement.dtype
            return to_tensor(array).to(placement.device, dtype)

        with torch.inference_mode():
            self.slots = KvSlots(facts, placement, limits.num_all_slots, limits.max_length)
            if facts.architecture is not None:
                program = load(
                    facts,
                    config,
                    limits.max_length,
                    progress,
                    lambda weight: pack(to_tensor(weight)),
                    place,
                )
                decoder = TorchModel(program, placement.dtype)
                self._model = decoder
                adaptable = decoder
                sites = sites_of(facts.architecture)
            else:
                # A checkpoint refuses pickles.
                Checkpoint(facts.path, allow_pickle=config.allow_pickle)
                wrapper = HuggingFaceModel(facts, placement, pack, config, progress)
                self._model = wrapper
                modules = None if lora is None else wrapper.with_adapters()

                # The check also says which of the modules can have adapters.
                wrapper.check(lambda plan: wrapper(self._prepare(plan)))
                self.slots.release(0)
                if modules is not None:
                    adaptable = modules
                    sites = modules.sites()

        self.adapters: AnyLoader | None = None
        if lora is not None and adaptable is not None:
            self.adapters = LoraLoader(facts, config, lora, sites, adaptable, lambda: place)

    @torch.inference_mode()
    def forward(self, plan: Plan) -> Array:
        """Compute a step: see `Runner.forward`."""
        try:
            return to_array(self._model(self._prepare(plan)).cpu())
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise

    def output(self, name: str) -> Array:
        """Return a declared output of the last step: see `Runner.output`."""
        return to_array(self._model.output(name).float().cpu())

    def _prepare(self, plan: Plan) -> StepInputs:
        """Return the rows of a plan, chunk by chunk."""
        token_ids = list[int]()
        positions = list[int]()
        slots = list[int]()
        wanted_rows = list[int]()
        users: dict[int, _UsersOfAdapter] = {}
        for chunk in plan.chunks:
            if chunk.adapter:
                users_of_adapter = users.setdefault(chunk.adapter, _UsersOfAdapter())
                users_of_adapter.rows += range(
                    len(token_ids), len(token_ids) + len(chunk.token_ids)
                )
                users_of_adapter.places += range(
                    len(wanted_rows), len(wanted_rows) + chunk.num_logits
                )

            token_ids += chunk.token_ids
            positions += range(chunk.start, chunk.end)
            slots += [chunk.slot] * len(chunk.token_ids)
            wanted_rows += range(len(token_ids) - chunk.num_logits, len(token_ids))

        tokens = torch.tensor((token_ids, positions, slots), device=self._device)
        cells = self.slots.cell_indices(slots=tokens[2], positions=tokens[1])
        adapted: list[AdaptedRows] = []
        for number, users_of_adapter in users.items():
            rows = self._indices(users_of_adapter.rows)
            places = self._indices(users_of_adapter.places)
            adapted.append(AdaptedRows(number, rows, places))

        return StepInputs(
            token_ids=tokens[0],
            positions=tokens[1],
            wanted=self._indices(wanted_rows),
            attention=Attention(self.slots, plan, cells),
            adapted=tuple(adapted),
        )

    def _indices(self, rows: list[int]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self._device)
