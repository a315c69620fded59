"""The model on its device: a plan of the scheduler in, logits out.

Owns the weights and the cache rows and turns pieces of token ids into tensors. With batch invariance on a CPU every
product has at least two rows (see `linear`) and attention keeps to a grid of shapes (see `attention`, `invariance`),
so what a sequence gets does not depend on its neighbours. Knows nothing of requests, sampling or budgets.

Threads are the business of whoever starts the process, before torch is imported: OMP_NUM_THREADS, and always
GOMP_SPINCOUNT=1000, without which two threads beside one busy process are ten times slower.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from handlers.lmi_dist.attention import Attention, Grid, View, query_counts
from handlers.lmi_dist.decoder import Decoder, Layer, Step
from handlers.lmi_dist.families import Architecture, describe
from handlers.lmi_dist.hf_fallback import HuggingFaceModel
from handlers.lmi_dist.invariance import find_grid, layers_agree
from handlers.lmi_dist.kv_slots import KvRows
from handlers.lmi_dist.linear import LinearBuilder
from handlers.lmi_dist.plan import Plan
from handlers.lmi_dist.weights import Checkpoint, read_config, read_facts
from lmi.errors import BadConfiguration
from lmi.executor import Progress
from lmi.settings.config import EngineConfig

log = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NUM_CHECKED_ROWS, _CHECKED_LENGTH = 17, 700


class ModelRunner:
    """One model replica. Not safe to call from two threads at once."""

    def __init__(
        self,
        path: str,
        config: EngineConfig,
        *,
        num_rows: int,
        max_length: int,
        piece_length: int = 128,
        allow_pickle: bool = False,
        progress: Progress = lambda stage, share: None,
    ) -> None:
        facts, model_config = read_facts(path), read_config(path)
        if max_length > facts.context_length:
            raise ValueError(f"max_length must be at most {facts.context_length}, given {max_length}")
        self._device = choose_device(config)
        dtype = choose_dtype(config, self._device, getattr(model_config, "dtype", None))
        self.vocab_size, self.context_length, self.end_ids = facts.vocab_size, facts.context_length, facts.end_ids
        self.dtype, self.device = str(dtype).removeprefix("torch."), str(self._device)
        self.piece_length, self.max_length, self._num_rows = piece_length, max_length, num_rows
        architecture = describe(model_config)
        group = facts.num_heads // facts.num_kv_heads
        with torch.inference_mode():
            grid = None
            if self._should_be_invariant(config, dtype, architecture):
                grid = find_grid(facts.num_kv_heads, group, facts.head_dim)
            self.is_batch_invariant = grid is not None
            self.kv = KvRows(
                num_rows=num_rows + 1,  # a lone row asks together with its neighbour
                num_layers=facts.num_layers,
                num_heads=facts.num_kv_heads,
                max_length=(grid or Grid(1)).length(max_length),
                head_dim=facts.head_dim,
                dtype=dtype,
                device=self._device,
            )
            grid = grid or Grid(query_counts(group)[0])
            self._attention = Attention(self.kv, grid, group, self.is_batch_invariant)
            build = LinearBuilder(self._device, dtype, config.quantize, self.is_batch_invariant)
            checkpoint = Checkpoint(path, allow_pickle=allow_pickle, progress=progress)
            if architecture is None:
                self._model = HuggingFaceModel(path, model_config, build, self._attention, progress)
                self._model.check(self.forward)
                self._model.pack(build)
                self.release(0)
            else:
                self._model = Decoder(architecture, checkpoint, build, self._attention, max_length)
            if self.is_batch_invariant:
                self.is_batch_invariant = self._layers_agree()

    @torch.inference_mode()
    def forward(self, plan: Plan) -> Tensor:
        """float32 (num_logits, vocab_size): in the order of the pieces, each piece's wanted positions in order."""
        num_wanted = sum(piece.num_logits for piece in plan.pieces)
        return self._model(self._prepare(plan))[:num_wanted]

    @torch.inference_mode()
    def copy(self, row: int, to_rows: list[int], num_tokens: int) -> None:
        """Other rows get the keys and values of the first `num_tokens` of a row, bit by bit."""
        self.kv.copy(row, to_rows, num_tokens)

    def release(self, row: int) -> None:
        """The row is free: its memory goes back to the system where that is possible."""
        self.kv.release(row)

    def _prepare(self, plan: Plan) -> Step:
        token_ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        wanted: list[int] = []
        for piece in plan.pieces:
            token_ids += piece.token_ids
            positions += range(piece.start, piece.end)
            rows += [piece.row] * len(piece.token_ids)
            wanted += range(len(token_ids) - piece.num_logits, len(token_ids))
        num_tokens = len(token_ids)
        if self._attention.is_paired:
            _pair(token_ids, positions, rows)
            _pair(wanted)
        tokens = torch.tensor((token_ids, positions, rows), device=self._device)
        return Step(
            token_ids=tokens[0],
            positions=tokens[1],
            num_tokens=num_tokens,
            slots=self.kv.slots(tokens[2, :num_tokens], tokens[1, :num_tokens]),
            views=_Views(self._attention, plan, len(token_ids)),
            wanted=torch.tensor(wanted, dtype=torch.int64, device=self._device),
            queries=self._attention.new_queries(len(token_ids)),
        )

    def _should_be_invariant(self, config: EngineConfig, dtype: torch.dtype, architecture: Architecture | None) -> bool:
        """The rules are known for float32 on a CPU; capped scores go through matrix products that break them."""
        is_plain = self._device.type == "cpu" and dtype == torch.float32 and config.quantize is None
        is_known = architecture is not None and architecture.softcap is None
        return config.batch_invariant and is_plain and is_known

    def _layers_agree(self) -> bool:
        num_rows = min(_NUM_CHECKED_ROWS, self._num_rows)
        length = min(_CHECKED_LENGTH, self.max_length)
        self.kv.randomize(num_rows, length)
        layers = self._model.kinds()
        agree = layers_agree(lambda plan: self._run(plan, layers), num_rows, length, self.vocab_size)
        for row in range(num_rows + 1):
            self.kv.release(row)
        log.log(
            logging.INFO if agree else logging.WARNING,
            "answers %s on their neighbours in the batch, down to the last bit (threads: %d)",
            "do not depend" if agree else "may depend",
            torch.get_num_threads(),
        )
        log.debug("attention is computed on %s", self._attention.grid)
        return agree

    def _run(self, plan: Plan, layers: list[Layer]) -> Tensor:
        num_wanted = sum(piece.num_logits for piece in plan.pieces)
        return self._model(self._prepare(plan), layers)[:num_wanted]


class _Views(dict[int | None, View]):
    """What each window sees in one step, worked out when a layer first asks."""

    def __init__(self, attention: Attention, plan: Plan, num_tokens: int) -> None:
        super().__init__()
        self._attention, self._plan, self._num_tokens = attention, plan, num_tokens

    def __missing__(self, window: int | None) -> View:
        self[window] = view = self._attention.plan(self._plan, self._num_tokens, window)
        return view


def _pair(*columns: list[int]) -> None:
    """Repeat a lone row: one row alone may round differently from the same row in a batch."""
    for column in columns:
        if len(column) == 1:
            column.append(column[0])


def choose_device(config: EngineConfig) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise BadConfiguration("option.device=cuda, but torch sees no CUDA device here; use cpu or auto")
    device = torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")
    if config.quantize is not None and (config.quantize != "int8" or device.type != "cpu"):
        raise BadConfiguration(f"option.quantize={config.quantize} on {device.type}: only int8 on cpu is built")
    return device


def choose_dtype(config: EngineConfig, device: torch.device, checkpoint_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of weights and cache.

    `auto` is the checkpoint's on CUDA. On a CPU it is float32, since batch invariance holds for nothing else and,
    without bf16 instructions, bf16 is up to three times slower. With them (measured on AMD Zen 4, 135M parameters) a
    bf16 step takes 0.6 to 0.7 of the time, so a bf16 checkpoint stays bf16 there if invariance is switched off.
    """
    if device.type == "cuda":
        return _DTYPES.get(config.dtype) or checkpoint_dtype or torch.float32
    if config.quantize == "int8":
        return torch.float32  # of activations and cache; the kernels take nothing else
    if config.dtype == "fp16":
        log.warning("float32 instead of float16: this CPU has no arithmetic for it")
        return torch.float32
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    is_bf16_fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    may_be_bf16 = is_bf16_fast and not config.batch_invariant and checkpoint_dtype == torch.bfloat16
    return torch.bfloat16 if may_be_bf16 else torch.float32


def kv_bytes_per_token(path: str, config: EngineConfig) -> int:
    """Bytes of cache that one token needs over all layers."""
    device = choose_device(config)
    dtype = choose_dtype(config, device, getattr(read_config(path), "dtype", None))
    return read_facts(path).kv_elements_per_token * dtype.itemsize
