"""The runner of the native kernels: a program, its packed weights, and keys and values in shared
blocks.

All arithmetic is float32, or int8 with `option.quantize=int8`; where the CPU can, weights in
bfloat16 are multiplied by activations that are rounded to bfloat16. The weights of a GGUF file, and
those of AWQ, GPTQ and compressed-tensors, stay in blocks of 4 or 8 bits, which are multiplied by
activations of 16 bits; `option.quantize=int4` makes such blocks. The order of every sum is fixed,
so the bits of a token depend only on the tokens before it: not on the batch, on how its prompt was
cut, or on the number of threads.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from handlers.lmi_dist.arrays import BFLOAT16, Array
from handlers.lmi_dist.facts import ModelFacts
from handlers.lmi_dist.gguf.tensors import DTYPES
from handlers.lmi_dist.limits import Limits
from handlers.lmi_dist.linear_sites import sites_of
from handlers.lmi_dist.lora import LoraLoader
from handlers.lmi_dist.lora_limits import LoraLimits
from handlers.lmi_dist.native.library import Library, num_threads
from handlers.lmi_dist.native.model import NativeModel
from handlers.lmi_dist.native.pages import Arena
from handlers.lmi_dist.native.records import (
    BF16,
    BITS4,
    BITS4_ZERO,
    BITS8,
    BITS8_HALVES,
    BITS8_ZERO,
    F32,
    INT8,
    SMALL_GROUP,
    TOKENS_PER_BLOCK,
    Panels,
)
from handlers.lmi_dist.native_variants import ROUNDING_VARIANTS
from handlers.lmi_dist.operations import Linear, Pack, Program
from handlers.lmi_dist.plan import Plan
from handlers.lmi_dist.program import load
from handlers.lmi_dist.weights import stored_dtype, stored_types
from lmi.executor import Progress
from lmi.settings.config import EngineConfig
from lmi.shared.gguf_file import TensorType

# The bytes of a number by its format. 64 numbers of int8 share a scale and a sum, and 32 numbers in
# blocks share two scales, or a scale and a minimum or a zero point.
BYTES_OF = {
    F32: 4.0,
    BF16: 2.0,
    INT8: 1 + 4 / 64,
    BITS4: 0.5 + 4 / 32,
    BITS8: 1 + 4 / 32,
    BITS8_HALVES: 1 + 4 / 32,
    BITS4_ZERO: 0.5 + 4 / 32,
    BITS8_ZERO: 1 + 4 / 32,
}
# What the engine says of weights that no option quantises, by the narrowest format that one has.
_DTYPES = {
    F32: "float32",
    BF16: "bfloat16",
    INT8: "int8",
    BITS4: "4-bit blocks",
    BITS8: "8-bit blocks",
    BITS8_HALVES: "8-bit blocks",
    BITS4_ZERO: "4-bit blocks",
    BITS8_ZERO: "8-bit blocks",
}
# So many are taken at a time for the weights of an adapter, and go with it.
_ADAPTER_BYTES = 2 << 20


class NativeRunner:
    """One model replica on a CPU. Not safe to call from two threads at once."""

    device = "cpu"
    is_batch_invariant = True
    tokens_per_block = TOKENS_PER_BLOCK
    slots = None

    def __init__(
        self,
        facts: ModelFacts,
        library: Library,
        config: EngineConfig,
        limits: Limits,
        progress: Progress,
    ) -> None:
        assert facts.architecture is not None
        self.pooling = facts.pooling
        self.program = load(
            facts,
            config,
            limits.max_length,
            progress,
            lambda weight: library.pack(weight, _format(facts, config, weight.dtype, weight.shape)),
            pack_blocks=library.pack_blocks if keeps_blocks(config) else None,
        )
        self._model = NativeModel(
            library,
            self.program,
            limits.num_cache_tokens // TOKENS_PER_BLOCK,
            num_threads(),
            kv_format(library, config, stored_dtype(facts.path)),
        )
        self.memory = self._model
        self.library = library
        self.weight_bytes = _bytes_held(library, self.program)
        # The number of rows of the last step.
        self._num_wanted = 0
        self.adapters = None
        lora = LoraLimits.of(config.options)
        if lora is not None:
            sites = sites_of(facts.architecture)

            def new_pack() -> Pack[Panels]:
                return partial(library.pack, format=F32, arena=Arena(_ADAPTER_BYTES))

            self.adapters = LoraLoader(facts, config, lora, sites, self._model, new_pack)

        self.vocab_size = facts.vocab_size
        self.context_length = facts.context_length
        formats: set[int] = set()
        for operation in self.program.operations:
            if isinstance(operation, Linear):
                formats.add(operation.weight.format)
                if operation.gate is not None:
                    formats.add(operation.gate.format)

        narrowest = min(formats, key=lambda format: BYTES_OF[format])
        self.dtype = config.quantize or _DTYPES[narrowest]
        self.kernels = f"native {library.kind}"

    def forward(self, plan: Plan) -> Array:
        """Compute a step: see `Runner.forward`."""
        for copy in plan.copies:
            self._model.copy(copy.source, copy.target)

        logits = self._model.run(plan.chunks)
        self._num_wanted = len(logits)
        return logits

    def output(self, name: str) -> Array:
        """Return a declared output of the last step: see `Runner.output`."""
        return self._model.buffer(self.program.outputs[name])[: self._num_wanted]


def _bytes_held(library: Library, program: Program[Panels]) -> int:
    """The memory of a program's weights, without those that stay in a mapped file."""
    sizes: dict[int, int] = {}
    for operation in program.operations:
        for name in operation.__struct_fields__:
            value = getattr(operation, name)
            if isinstance(value, Panels):
                sizes[value.data] = library.bytes_of(value)
            elif isinstance(value, np.ndarray) and value.flags.writeable:
                sizes[value.ctypes.data] = value.nbytes

    return sum(sizes.values())


def _format(
    facts: ModelFacts, config: EngineConfig, stored: np.dtype[Any], shape: tuple[int, ...]
) -> int:
    """The format of a weight (num_out, num_in) that is in floats.

    With `int4` two kinds of weights have eight bits: the head, which has an output for each token,
    since its error goes straight into the log-probs, and rows that are no whole groups.
    """
    if config.quantize is None:
        return _format_of_floats(config, stored)

    num_out, num_in = shape
    is_whole = num_in % SMALL_GROUP == 0
    if config.quantize == "int4" and is_whole and num_out != facts.vocab_size:
        return BITS4

    return INT8


def _format_of_floats(config: EngineConfig, stored: np.dtype[Any]) -> int:
    """As bfloat16 a weight is half as large. On a CPU that does not multiply bfloat16 it gives the
    same bits as the same numbers in float32.
    """
    return BF16 if _is_narrow(config, stored) else F32


def _is_narrow(config: EngineConfig, stored: np.dtype[Any]) -> bool:
    return config.dtype == "bf16" or (config.dtype == "auto" and stored == BFLOAT16)


def kv_format(library: Library, config: EngineConfig, stored: np.dtype[Any]) -> int:
    """Return the format of keys and values, by the dtype of most numbers of the checkpoint."""
    multiplies_bfloat16 = library.kind in ROUNDING_VARIANTS
    return BF16 if multiplies_bfloat16 and _is_narrow(config, stored) else F32


def weight_bytes(
    facts: ModelFacts, config: EngineConfig, stored: np.dtype[Any], shape: tuple[int, int]
) -> float:
    """The bytes that a number of a checkpoint takes in a packed weight (num_out, num_in)."""
    return BYTES_OF[_format(facts, config, stored, shape)]


def keeps_blocks(config: EngineConfig) -> bool:
    """Whether weights in blocks stay so, those of a GGUF file and quantised ones: where no option
    says otherwise.
    """
    return config.quantize is None and config.dtype == "auto"


def block_bytes(library: Library, config: EngineConfig) -> Callable[[TensorType], float] | None:
    """What says how many bytes a number of a quantised weight takes, by the type of its blocks, or
    None if such weights become floats.
    """
    if not keeps_blocks(config):
        return None

    return lambda kind: BYTES_OF[library.format_of(kind)]


def bytes_of_file(library: Library, config: EngineConfig, path: str) -> int | None:
    """The bytes that the packed weights of a folder's GGUF file take, or None if they do not stay
    as they are in such a file.
    """
    sizes = stored_types(path) if keeps_blocks(config) else None
    if sizes is None:
        return None

    num_bytes = 0.0
    for kind, num_numbers in sizes.items():
        dtype = DTYPES.get(kind.name)
        if dtype is None:
            format = library.format_of(kind)
        else:
            format = _format_of_floats(config, np.dtype(dtype))

        num_bytes += num_numbers * BYTES_OF[format]

    return int(num_bytes)
