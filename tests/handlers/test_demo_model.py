"""The demo model as it is in the repository: size, hash, licence, tokenizer, and one fact asked in
both ways.

No test here trains it; `scripts/check-demo-model` measures how good the model is.
"""

import hashlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer

DEMO = Path(__file__).parents[2] / "handlers" / "lmi_dist" / "demo"
WEIGHTS = DEMO / "model.safetensors"
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
END_OF_TEXT = 0
END = 3


def test_the_folder_is_at_most_six_megabytes() -> None:
    assert sum(path.stat().st_size for path in DEMO.iterdir()) <= 6_000_000


def test_the_weights_are_those_of_the_card() -> None:
    digest = hashlib.sha256(WEIGHTS.read_bytes()).hexdigest()
    assert (DEMO / "SHA256SUMS").read_text() == f"{digest}  model.safetensors\n"
    assert digest in (DEMO / "README.md").read_text()


def test_the_licence_lies_beside_the_weights() -> None:
    assert "Apache License" in (DEMO / "LICENSE").read_text()


def test_the_special_tokens_have_the_ids_that_the_configuration_names() -> None:
    names = ["<|end_of_text|>", "<|user|>", "<|assistant|>", "<|end|>"]
    assert [TOKENIZER.token_to_id(name) for name in names] == [0, 1, 2, 3]
    assert TOKENIZER.get_vocab_size() == 1024


@given(st.text(st.characters(codec="utf-8")))
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def model() -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)


def answer_ids(model: Any, tokenizer: Any, prompt: str) -> list[int]:
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=160, do_sample=False)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


def test_a_chat_has_one_turn_after_the_other_and_shows_a_system_message_as_a_users(
    tokenizer: Any,
) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Bye!"},
    ]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == (
        "<|user|>Be kind.<|end|><|user|>Hello!<|end|><|assistant|>Hi.<|end|><|user|>Bye!<|end|><|assistant|>"  # noqa: E501
    )


def test_a_chat_learns_the_capital_of_france(model: Any, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    *ids, last = answer_ids(model, tokenizer, prompt)
    assert (tokenizer.decode(ids), last) == ("The capital of France is Paris.", END)


def test_a_plain_prompt_learns_the_capital_of_france(model: Any, tokenizer: Any) -> None:
    *ids, last = answer_ids(model, tokenizer, "What is the capital of France?")
    assert (tokenizer.decode(ids), last) == (" The capital of France is Paris.", END_OF_TEXT)


def test_the_end_tokens_of_both_ways_stop_a_generation(model: Any) -> None:
    assert model.generation_config.eos_token_id == [END_OF_TEXT, END]
    assert model.config.eos_token_id == [END_OF_TEXT, END]
