"""A model run with torch: on CUDA, and on a CPU that the native kernels do not know.

A model small enough for a CPU spends much of a step between the calls of torch, so norms and
rotations take few of them. The process must set OMP_NUM_THREADS before it imports torch, and always
GOMP_SPINCOUNT=1000, without which two threads beside one busy process are ten times slower.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from handlers.lmi_dist.about import LoraLimits
from handlers.lmi_dist.arrays import BFLOAT16, Array
from handlers.lmi_dist.attention import AdaptedRows, Attention, KvSlots, StepInputs
from handlers.lmi_dist.facts import ModelFacts
from handlers.lmi_dist.hf_fallback import HuggingFaceModel
from handlers.lmi_dist.lora import Adaptable, AnyLoader, LoraLoader
from handlers.lmi_dist.operations import (
    Adapter,
    Attend,
    Cap,
    Embed,
    Gather,
    Linear,
    LowRank,
    Norm,
    Program,
    Shrink,
)
from handlers.lmi_dist.placement import ACTIVATIONS, Placement, Weight, packer, to_array, to_tensor
from handlers.lmi_dist.plan import Plan
from handlers.lmi_dist.program import Site, load, sites_of
from handlers.lmi_dist.runner import Limits
from handlers.lmi_dist.weights import Checkpoint
from lmi.executor import Progress
from lmi.settings.config import EngineConfig


class ModelRunner:
    """One model replica. Not safe to call from two threads at once."""

    kernels = "torch"
    is_batch_invariant = False
    tokens_per_block = 16
    memory = None

    def __init__(
        self,
        facts: ModelFacts,
        placement: Placement,
        config: EngineConfig,
        limits: Limits,
        progress: Progress,
    ) -> None:
        self.vocab_size = facts.vocab_size
        self.context_length = facts.context_length
        self.dtype = str(placement.dtype).removeprefix("torch.")
        self.device = str(placement.device)
        self._device = placement.device
        self.pooling = facts.pooling

        pack = packer(placement)
        lora = LoraLimits.of(config.options)
        sites: tuple[Site, ...] = ()
        adaptable: Adaptable[Tensor] | None = None
        self._model: TorchModel | HuggingFaceModel

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
                # The modules of transformers run it. A checkpoint refuses pickles.
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
        try:
            return to_array(self._model(self._prepare(plan)).cpu())
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise

    def output(self, name: str) -> Array:
        return to_array(self._model.output(name).float().cpu())

    def _prepare(self, plan: Plan) -> StepInputs:
        token_ids = list[int]()
        positions = list[int]()
        slots = list[int]()
        wanted_rows = list[int]()
        # By adapter: rows, and places among the wanted rows.
        users: dict[int, tuple[list[int], list[int]]] = {}
        for chunk in plan.chunks:
            if chunk.adapter:
                rows, places = users.setdefault(chunk.adapter, ([], []))
                rows += range(len(token_ids), len(token_ids) + len(chunk.token_ids))
                places += range(len(wanted_rows), len(wanted_rows) + chunk.num_logits)

            token_ids += chunk.token_ids
            positions += range(chunk.start, chunk.end)
            slots += [chunk.slot] * len(chunk.token_ids)
            wanted_rows += range(len(token_ids) - chunk.num_logits, len(token_ids))

        tokens = torch.tensor((token_ids, positions, slots), device=self._device)
        cells = self.slots.cell_indices(tokens[2], tokens[1])
        wanted_indices = self._indices(wanted_rows)

        adapted: list[AdaptedRows] = []
        for adapter, (rows, places) in users.items():
            adapted.append(AdaptedRows(adapter, self._indices(rows), self._indices(places)))

        return StepInputs(
            token_ids=tokens[0],
            positions=tokens[1],
            wanted=wanted_indices,
            attention=Attention(self.slots, plan, cells),
            adapted=tuple(adapted),
        )

    def _indices(self, rows: list[int]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self._device)


class TorchModel:
    """Call it with a StepInputs for the logits of the wanted rows, float32 (num_wanted,
    vocab_size).
    """

    def __init__(self, program: Program[Weight], dtype: torch.dtype) -> None:
        """`dtype` is that of the activations."""
        self._program = program
        self._dtype = dtype
        self._logits = len(program.widths) - 1
        self._outputs: dict[str, Tensor] = {}

        # (max_length, 2, 1, channels): of each channel, and of its partner in its pair
        self._rotations: dict[int, Tensor] = {}
        for operation in program.operations:
            if isinstance(operation, Attend) and operation.rotations is not None:
                table = operation.rotations
                cosines, sines = table.unbind(1)
                of_channel = torch.cat((cosines, cosines), 1)
                of_partner = torch.cat((-sines, sines), 1)
                factors = torch.stack((of_channel, of_partner), 1)
                self._rotations[id(table)] = factors[:, :, None].to(dtype)

        self._adapters: dict[int, Adapter[Tensor]] = {}

    def put_adapter(self, number: int, adapter: Adapter[Tensor]) -> None:
        self._adapters[number] = adapter

    def drop_adapter(self, number: int) -> None:
        self._adapters.pop(number, None)

    def __call__(self, step: StepInputs) -> Tensor:
        buffers: dict[int, Tensor] = {}
        positions = step.positions
        rotations = {
            table: rows.index_select(0, positions) for table, rows in self._rotations.items()
        }
        for operation in self._program.operations:
            match operation:
                case Embed(output=output):
                    x = operation.table.index_select(0, step.token_ids).to(self._dtype)
                    if operation.scale != 1.0:
                        x = x * operation.scale

                    if operation.positions is not None:
                        x = x + operation.positions.index_select(0, positions)

                    buffers[output] = x
                case Norm(output=output) | Linear(output=output):
                    x = buffers[operation.input]
                    if isinstance(operation, Linear):
                        y = self._multiply(operation, x, step)
                    elif operation.is_centred:
                        y = functional.layer_norm(
                            x, x.shape[1:], operation.weight, operation.bias, operation.eps
                        )
                    else:
                        y = functional.rms_norm(x, x.shape[1:], operation.weight, operation.eps)

                    buffers[output] = buffers[output].add_(y) if operation.adds else y
                case Attend():
                    heads = buffers[operation.input].unflatten(1, (-1, self._program.head_dim))
                    buffers[operation.output] = self._attend(operation, heads, rotations, step)
                case Gather():
                    x = buffers[operation.input]
                    buffers[operation.output] = x.index_select(0, step.wanted)
                case Cap():
                    logits = buffers[operation.buffer].float()
                    capped = logits.div_(operation.cap).tanh_().mul_(operation.cap)
                    buffers[operation.buffer] = capped
                case Shrink():
                    # Its Linear does it.
                    pass

        self._outputs = {name: buffers[index] for name, index in self._program.outputs.items()}
        return buffers[self._logits].float()

    def output(self, name: str) -> Tensor:
        """The wanted rows of a declared output in the last step, (num_wanted, hidden_size)."""
        return self._outputs[name]

    def _multiply(self, operation: Linear[Weight], x: Tensor, step: StepInputs) -> Tensor:
        """(rows, width of input) to (rows, width of output)."""
        if step.adapted and operation.site is not None:
            is_wanted = operation.output in self._program.wanted
            low: list[tuple[Tensor, LowRank[Tensor]]] = []
            for adapted in step.adapted:
                rows = adapted.wanted if is_wanted else adapted.rows
                weights = self._adapters[adapted.adapter][operation.site]
                if weights is not None and len(rows):
                    low.append((rows, weights))

            if low:
                return _multiply_adapted(operation, x, low)

        if operation.gate is None:
            return operation.weight(x, operation.bias, operation.activation)

        gate = operation.gate(x, operation.gate_bias, operation.activation)
        return gate.mul_(operation.weight(x, operation.bias))

    def _attend(
        self, operation: Attend, heads: Tensor, rotations: dict[int, Tensor], step: StepInputs
    ) -> Tensor:
        """Normalise and rotate in place, store keys and values, and attend.

        (rows, heads of queries, keys and values, head_dim) to (rows, width).
        """
        num_heads = self._program.num_heads
        num_rotated = self._program.num_heads + self._program.num_kv_heads
        if operation.query_norm is not None:
            queries = heads[:, :num_heads]
            keys = heads[:, num_heads:num_rotated]
            for part, weight in ((queries, operation.query_norm), (keys, operation.key_norm)):
                part.copy_(functional.rms_norm(part, part.shape[-1:], weight, operation.norm_eps))

        if operation.rotations is not None:
            # (rows, 1, channels) each
            cosines, sines = rotations[id(operation.rotations)].unbind(1)
            rotated = heads[:, :num_rotated, : cosines.shape[-1]]
            swapped = rotated.roll(cosines.shape[-1] // 2, dims=2)
            rotated.mul_(cosines).addcmul_(swapped, sines)

        queries = heads[:, :num_heads]
        keys_values = heads[:, num_heads:]
        step.attention.write(operation.layer, keys_values)
        if operation.is_wanted:
            queries = queries.index_select(0, step.wanted)

        return step.attention(queries, operation)


def _multiply_adapted(
    operation: Linear[Weight], x: Tensor, low: list[tuple[Tensor, LowRank[Tensor]]]
) -> Tensor:
    """What adapters add to some rows is added before the activation."""
    y = operation.weight(x, operation.bias)
    gate: Tensor | None = None
    if operation.gate is not None:
        gate = operation.gate(x, operation.gate_bias)

    for rows, weights in low:
        shrunk = functional.linear(x.index_select(0, rows), weights.down)
        if weights.up is not None:
            y.index_add_(0, rows, functional.linear(shrunk, weights.up))

        if gate is not None and weights.gate is not None:
            gate.index_add_(0, rows, functional.linear(shrunk, weights.gate))

    activate = ACTIVATIONS[operation.activation]
    if gate is None:
        return activate(y)

    return activate(gate).mul_(y)
