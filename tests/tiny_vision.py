"""A small random model that sees: Idefics 3, which vLLM runs without torchvision. Made by
transformers' classes.
"""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import Any

from tests.tiny_models import CONTEXT_LENGTH, END_ID, VOCAB_SIZE, _folder, save_tokenizer

IMAGE = "<image>"
# It takes parts only, as the templates of Idefics 3 and SmolVLM do.
TEMPLATE = (
    "{% for m in messages %}{{ '<|user|>' if m['role'] == 'user' else '<|assistant|>' }}{% for "
    "part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor "
    "%}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@functools.cache
def tiny_vision_model() -> Path:
    """The folder of a checkpoint with its processor. An image is one to five tiles of
    four tokens.
    """
    import torch
    import transformers as hf

    folder = _folder() / "vision"
    save_tokenizer(folder)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    images = hf.Idefics3ImageProcessor(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
    )
    processor = hf.Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE)
    processor.save_pretrained(folder)
    shape = {
        "hidden_size": 128,
        "intermediate_size": 112,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    text = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "head_dim": 32,
        "vocab_size": VOCAB_SIZE,
        **shape,
    }
    text |= {"max_position_embeddings": CONTEXT_LENGTH, "pad_token_id": 2}
    eyes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = hf.Idefics3Config(
        text_config=text,
        vision_config=eyes | {"image_size": 32, "patch_size": 8},
        scale_factor=2,
        image_token_id=processor.image_token_id,
        **{
            "bos_token_id": 1,
            "eos_token_id": END_ID,
            "pad_token_id": 2,
            "tie_word_embeddings": False,
        },
    )
    torch.manual_seed(1)
    model = hf.Idefics3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and "norm" in name and name.endswith("weight")
            parameter.normal_(1.0 if is_norm else 0.0, 0.1 if parameter.dim() == 1 else 0.25)

    model.save_pretrained(folder)
    return folder


def png(color: tuple[int, int, int], width: int = 64, height: int = 40) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    return file.getvalue()


def transformers_answer(
    text: str, files: list[bytes], num_tokens: int
) -> tuple[list[int], list[int]]:
    """The tokens of a prompt with its images, and those that transformers generates greedily."""
    import torch
    import transformers as hf
    from PIL import Image

    model: Any = hf.Idefics3ForConditionalGeneration.from_pretrained(tiny_vision_model()).eval()
    processor: Any = hf.Idefics3Processor.from_pretrained(tiny_vision_model())
    images = [Image.open(io.BytesIO(file)) for file in files]
    inputs = processor(text=text, images=images, return_tensors="pt", add_special_tokens=False)
    prompt = inputs["input_ids"][0].tolist()
    with torch.no_grad():
        out = model.generate(
            **inputs, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
        )

    return prompt, out[0, len(prompt) :].tolist()
