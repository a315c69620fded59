"""The model of the vLLM benchmark: a random Llama of five million parameters, and prompts for it.

It is so small that a benchmark measures the servers around it, not its kernels. Its tokenizer has
learned 4096 pieces of made-up words, so that every token is text. `scripts/overload` asks for 35
million parameters, whose steps count.

    python -m scripts.benchmarks.vllm_model FOLDER [SHAPE]
"""

import random
import sys
from pathlib import Path

from handlers.lmi_vllm.process_setup import hide_foreign_builds
from scripts.benchmarks.peers.shapes import Shape

NUM_PIECES = 4096
SHAPES = {
    "5M": Shape("llama", NUM_PIECES, 256, 688, 4, 4, 2),
    "35M": Shape("llama", NUM_PIECES, 512, 1536, 10, 8, 4),
}
# In a prompt.
WORDS_EACH = 32


def words(num_words: int = 6000) -> list[str]:
    """Made-up words, the same in every run."""
    draw = random.Random(0)
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    made_up: list[str] = []
    for _ in range(num_words):
        num_syllables = draw.randint(1, 4)
        made_up.append("".join(draw.choices(syllables, k=num_syllables)))

    return made_up


def prompts(num_prompts: int, seed: str) -> list[str]:
    """Prompts of random words. A seed always gives the same ones. No two share a start that is
    worth caching.
    """
    draw = random.Random(seed)
    choice = words()
    return [" ".join(draw.choices(choice, k=WORDS_EACH)) for _ in range(num_prompts)]


def make(folder: Path, shape: str = "5M") -> None:
    """Write the model of a shape, with its tokenizer."""
    hide_foreign_builds()
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_PIECES, special_tokens=["<end>"], show_progress=False
    )
    tokenizer.train_from_iterator((" ".join(words()) for _ in range(2)), trainer)
    of_transformers = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    of_transformers.save_pretrained(folder)

    torch.manual_seed(0)
    config = SHAPES[shape].config() | {"tie_word_embeddings": False, "eos_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.bfloat16().save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]), *sys.argv[2:])
