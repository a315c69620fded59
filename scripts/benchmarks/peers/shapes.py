"""The models of the comparison: random weights in three shapes, as a Hugging Face folder for each precision.

    python -m scripts.benchmarks.peers.shapes SHAPE FOLDER

A word is a token, so that a prompt has as many tokens at every server.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_TOKENS = 1024  # of a sequence: the longest prompt is 900


@dataclass(frozen=True)
class Shape:
    kind: str  # the model_type of transformers
    vocab_size: int
    hidden: int
    inner: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_new: int = 0  # tokens that a request makes

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

    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1", "model_max_length": 2048}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    make(SHAPES[sys.argv[1]], Path(sys.argv[2]))
