"""Small random checkpoints of every family, saved by transformers, with a small trained tokenizer
beside them.

`tiny_model("llama")` gives the folder of one; it is made once for each process and removed at its
end. The weights have a wider spread than at a real start of training, so that the best token is
clear and depends on the whole prompt.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

VOCAB_SIZE = 320
CONTEXT_LENGTH = 1024
END_ID = 0

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT_LENGTH,
}
_ALTERNATING = ["sliding_attention", "full_attention"]
# name -> (class stem in transformers, changes to the shape)
# An answer takes a while
# The narrowest head that vLLM has on a CPU
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama_bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_attention_heads": 8}),
    "llama_deep": (
        "Llama",
        {"tie_word_embeddings": True, "num_hidden_layers": 24},
    ),
    "llama_wide": (
        "Llama",
        {"num_attention_heads": 4, "head_dim": 32},
    ),
    "llama_long": (
        "Llama",
        {"num_attention_heads": 4, "head_dim": 32, "max_position_embeddings": 32 * CONTEXT_LENGTH},
    ),
    "llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama_linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama_yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 256,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 40}),
    "qwen2": ("Qwen2", {"num_attention_heads": 4, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {}),
    "gemma": ("Gemma", {"num_key_value_heads": 1, "hidden_activation": "gelu_pytorch_tanh"}),
    "gemma2": (
        "Gemma2",
        {"sliding_window": 40, "query_pre_attn_scalar": 24, "layer_types": _ALTERNATING},
    ),
    "gemma3": (
        "Gemma3",
        {"sliding_window": 40, "query_pre_attn_scalar": 24, "layer_types": _ALTERNATING},
    ),
    "phi": ("Phi", {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "phi3": ("Phi3", {"num_attention_heads": 4, "sliding_window": None, "pad_token_id": 0}),
    "gpt2": ("GPT2", {}),
    "opt": ("OPT", {}),
    "opt_post_norm": ("OPT", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    # Not in our tables, so it runs through the fallback
    "olmo2": ("Olmo2", {}),
    "olmo2_tied": ("Olmo2", {"tie_word_embeddings": True}),
}


@functools.cache
def tiny_model(family: str) -> Path:
    """The folder of a random checkpoint of `family`, float32, with tokenizer and
    generation config.
    """
    import torch
    import transformers

    stem, changes = FAMILIES[family]
    config = _config(transformers, stem, changes)
    torch.manual_seed(len(family))
    class_name = {"GPT2": "GPT2LMHeadModel"}.get(stem, f"{stem}ForCausalLM")
    model = getattr(transformers, class_name)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and "norm" in name or ".ln_" in name
            # These models multiply it by 10
            is_scaled = "embed_tokens" in name and "Gemma" in stem
            width = 0.1 if parameter.dim() == 1 else 0.08 if is_scaled else 0.25
            parameter.normal_(1.0 if is_norm and "Gemma" not in stem else 0.0, width)

    folder = _folder() / family
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def embedding_model(
    folder: Path, family: str, mode: str = "lasttoken", *, has_head: bool = True, **config: object
) -> Path:
    """Make the tiny model of a family one of sentence-transformers in `folder`, which normalises
    what it pools.

    With `mode` "" it has no modules. `config` are further values of its config.json. Its tokenizer
    ends each text.
    """
    import transformers

    shutil.copytree(tiny_model(family), folder, dirs_exist_ok=True)
    if not has_head:
        transformers.AutoModel.from_pretrained(folder).save_pretrained(folder)

    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    end = {"id": "<|end|>", "type_id": 0}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": end}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [END_ID], "tokens": ["<|end|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    if mode:
        paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
        modules = [
            {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for n, (kind, path) in enumerate(paths.items())
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir(exist_ok=True)
        pooling = {
            f"pooling_mode_{mode_name}": mode_name == mode
            for mode_name in ("cls_token", "mean_tokens", "lasttoken")
        }
        (folder / "1_Pooling" / "config.json").write_text(
            json.dumps(pooling | {"include_prompt": True})
        )

    return folder


def _config(transformers: Any, stem: str, changes: dict[str, Any]) -> Any:
    ends = {"eos_token_id": END_ID, "bos_token_id": 1}
    if stem == "GPT2":
        shape = {
            "vocab_size": VOCAB_SIZE,
            "n_embd": 96,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": CONTEXT_LENGTH,
        }
        return transformers.GPT2Config(**shape, **ends, **changes)

    if stem == "OPT":
        shape = {**_SHAPE, "num_attention_heads": 4, "ffn_dim": 112, "word_embed_proj_dim": 96}
        for name in ("num_key_value_heads", "head_dim", "intermediate_size"):
            del shape[name]

        return transformers.OPTConfig(**{**shape, **ends, **changes}, pad_token_id=2)

    name = "Gemma3TextConfig" if stem == "Gemma3" else f"{stem}Config"
    shape = {**_SHAPE, **ends, **changes}
    # Their head_dim follows from the hidden size
    if stem in ("Phi", "Phi3", "Olmo2"):
        shape["num_attention_heads"] = 4
        del shape["head_dim"]

    return getattr(transformers, name)(**shape)


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer of VOCAB_SIZE entries, trained on a few sentences: any text can be
    encoded.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sentences = [
        "The quick brown fox jumps over the lazy dog.",
        "She sells sea shells by the sea shore.",
    ]
    tokenizer.train_from_iterator(sentences * 20, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = (
        "{% for m in messages %}{{ '<|user|>' if m['role'] == 'user' else '<|assistant|>' }}"
        "{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif "
        "%}"
    )
    fast.save_pretrained(folder)


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="lmi-tiny-models-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
