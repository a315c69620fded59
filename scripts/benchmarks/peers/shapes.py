"""The models of the comparison: random weights in three shapes, as a Hugging Face folder for each
precision.

    python -m scripts.benchmarks.peers.shapes SHAPE FOLDER
    python -m scripts.benchmarks.peers.shapes openvino FROM FOLDER PRECISION...
    python -m scripts.benchmarks.peers.shapes llama-cpp FROM FILE

A word is a token, so that a prompt has as many tokens at every server. The others write such a
folder in the form of a peer, whose own venv they need.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# By module of a layer in transformers: its name in a GGUF file.
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
# The types of tokens in a GGUF file.
NORMAL = 1
BYTE = 6
# Of a sequence: the longest prompt has 900.
MAX_TOKENS = 1024


@dataclass(frozen=True)
class Shape:
    # The model_type of transformers.
    kind: str
    vocab_size: int
    hidden: int
    inner: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    # The tokens that a request makes.
    num_new: int = 0

    def config(self) -> dict[str, Any]:
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }


SHAPES = {
    "5M": Shape("llama", 4096, 256, 768, 4, 4, 2, num_new=64),
    "135M": Shape("llama", 49152, 576, 1536, 30, 9, 3, num_new=32),
    "0.5B": Shape("qwen2", 151936, 896, 4864, 24, 14, 2, num_new=16),
}


def make(shape: Shape, folder: Path) -> None:
    """Write folder/f32 and folder/bf16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(shape.kind, **shape.config()))
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        model.to(dtype).save_pretrained(folder / name)
        write_tokenizer(shape.vocab_size, folder / name)


def write_tokenizer(vocab_size: int, folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordLevel({f"w{number}": number for number in range(vocab_size)}, unk_token="w0")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "w1",
        "model_max_length": 2048,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def export_openvino(source: Path, folder: Path, *names: str) -> None:
    """Export a folder for OpenVINO in each of these precisions."""
    from optimum.exporters.openvino import main_export  # type: ignore[import-not-found]
    from optimum.intel import OVConfig, OVWeightQuantizationConfig  # type: ignore[import-not-found]

    # The widest groups of four bits that all rows of these models have whole.
    in_4_bits = OVWeightQuantizationConfig(bits=4, sym=False, group_size=64)
    in_8_bits = OVWeightQuantizationConfig(bits=8, sym=False)
    quantised = {"int8": in_8_bits, "int4": in_4_bits}
    for name in names:
        # Without a dtype it stays that of the checkpoint
        dtype = "fp32" if name == "f32" else None
        main_export(
            str(source),
            output=folder / name,
            task="text-generation-with-past",
            ov_config=OVConfig(dtype=dtype),
        )
        if name in quantised:
            quantise_openvino(folder / name, quantised[name])


def quantise_openvino(folder: Path, config: Any) -> None:
    """Quantise the weights of an exported folder, which the export itself leaves in floats."""
    from optimum.intel import OVModelForCausalLM

    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        model = OVModelForCausalLM.from_pretrained(
            folder, quantization_config=config, compile=False
        )
        model.save_pretrained(scratch)
        for file in Path(scratch).glob("openvino_model.*"):
            os.replace(file, folder / file.name)


def write_gguf(source: Path, file: Path) -> None:
    """Write a folder as a GGUF file in float32, for llama.cpp."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((source / "config.json").read_text())
    kind = config["model_type"]
    writer = gguf.GGUFWriter(str(file), kind)
    write_settings(writer, config)
    write_vocabulary(writer, config["vocab_size"])
    for name, tensor in load_file(source / "model.safetensors").items():
        if kind == "llama" and "q_proj" in name:
            tensor = interleaved(tensor, config["num_attention_heads"])
        elif kind == "llama" and "k_proj" in name:
            tensor = interleaved(tensor, config["num_key_value_heads"])

        writer.add_tensor(new_name(name), tensor)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_settings(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def write_vocabulary(writer: Any, vocab_size: int) -> None:
    """Write words, and the 256 bytes that llama.cpp's kind of tokenizer cannot do without."""
    tokens = [f"<0x{number:02X}>" for number in range(256)]
    tokens += [f"\u2581w{number}" for number in range(256, vocab_size)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * vocab_size)
    writer.add_token_types([BYTE] * 256 + [NORMAL] * (vocab_size - 256))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)


def interleaved(weight: Any, num_heads: int) -> Any:
    """Return the weight of a Llama's queries or keys in llama.cpp's order of channels.

    llama.cpp rotates neighbouring channels of a head, Hugging Face those that are half a head
    apart.
    """
    num_out, num_in = weight.shape
    num_pairs = num_out // num_heads // 2
    halves = weight.reshape(num_heads, 2, num_pairs, num_in)
    neighbours = halves.swapaxes(1, 2)
    return neighbours.reshape(num_out, num_in)


def new_name(name: str) -> str:
    outer = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    if name in outer:
        return outer[name]

    number, _, suffix = name.removeprefix("model.layers.").partition(".")
    part, _, ending = suffix.rpartition(".")
    return f"blk.{number}.{LAYER[part]}.{ending}"


EXPORTS: dict[str, Callable[..., None]] = {"openvino": export_openvino, "llama-cpp": write_gguf}

if __name__ == "__main__":
    word, *places = sys.argv[1:]
    if word in EXPORTS:
        source, goal, *names = places
        EXPORTS[word](Path(source), Path(goal), *names)
    else:
        make(SHAPES[word], *map(Path, places))
