"""Writes a Hugging Face folder of `shapes` as a GGUF file in float32, for llama.cpp. Runs in the peer's own venv.

python -m scripts.benchmarks.peers.gguf_model FROM FILE
"""

import json
import sys
from pathlib import Path
from typing import Any

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
NORMAL, BYTE = 1, 6  # types of tokens


def write(source: Path, file: Path) -> None:
    import gguf  # type: ignore[import-not-found]
    from safetensors.numpy import load_file

    config = json.loads((source / "config.json").read_text())
    kind = config["model_type"]
    writer = gguf.GGUFWriter(str(file), kind)
    write_settings(writer, config)
    write_vocabulary(writer, config["vocab_size"])
    for name, tensor in load_file(source / "model.safetensors").items():
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = interleaved(tensor, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        writer.add_tensor(new_name(name), tensor)
    for write_part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write_part()
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
    """Words, and the 256 bytes that llama.cpp's kind of tokenizer cannot do without."""
    tokens = [f"<0x{number:02X}>" for number in range(256)] + [f"\u2581w{number}" for number in range(256, vocab_size)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * vocab_size)
    writer.add_token_types([BYTE] * 256 + [NORMAL] * (vocab_size - 256))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)


def interleaved(weight: Any, num_heads: int) -> Any:
    """llama.cpp rotates neighbouring channels of a Llama's heads, Hugging Face those that are half a head apart."""
    num_out, num_in = weight.shape
    return weight.reshape(num_heads, 2, num_out // num_heads // 2, num_in).swapaxes(1, 2).reshape(num_out, num_in)


def new_name(name: str) -> str:
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in outer:
        return outer[name]
    number, _, rest = name.removeprefix("model.layers.").partition(".")
    part, _, ending = rest.rpartition(".")
    return f"blk.{number}.{LAYER[part]}.{ending}"


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
