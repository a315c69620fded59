"""Patterns of names against Python's `re`, and those that `re` would never finish."""

from __future__ import annotations

import re

import pytest

from handlers.base.name_patterns import MAX_PATTERNS, PatternRefused, check, is_end, is_plain, is_whole

NAMES = [
    "lm_head",
    *(
        f"model.layers.{layer}.{module}"
        for layer in (0, 1, 11, 21)
        for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.experts.3.w1")
    ),
    "transformer.h.0.attn.c_attn",
    "model.vision_tower.layers.1.q_proj",
]
# As PEFT, ms-swift, Unsloth and the pages of models write them.
WHOLE = [
    r".*\.h\.0\..*c_(attn|proj)",
    r".*\.(q_proj|v_proj)$",
    r"^(?!.*vision).*(?:q|o)_proj$",
    r"model\.layers\.(0|1|2[0-9])\..*",
    r"(?:.*q_proj|^lm_head$)",
    r"model.layers.\d+.self_attn.[qkvo]_proj",
    r".*layers\.[^.]+\.mlp\..*?w\d{1,2}",
    r"(?:.*?(?:vision|language|model|text).*?(?:self_attn|attention|mlp|ffn).*?(?:q_proj|o_proj|gate_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|w1)))",
    r"(model)(?=\.).*\.(q_proj|gate_proj)",
    r"(.*)*x",
    r"(a*)*(b|b)*",
    r"",
]
ENDS = ["q_proj", r"self_attn\.q_proj", r".*\.o_proj", r"^model\.layers\.1\.mlp\.gate_proj", "lm_head$", "^q_proj"]
ENDS += [r"(q|o)_proj", r"layers\.[0-9]\..*proj", r"^lm_head$", ".*q_proj", "1.mlp.gate_proj", r"w\d"]


@pytest.mark.parametrize("pattern", WHOLE)
def test_a_pattern_fits_the_names_that_re_finds(pattern: str) -> None:
    short = [name[-14:] for name in NAMES] if "*)*" in pattern else NAMES  # the others end in time only here
    assert [is_whole(pattern, name) for name in short] == [re.fullmatch(pattern, name) is not None for name in short]


@pytest.mark.parametrize("pattern", ENDS)
def test_a_pattern_fits_the_ends_of_names_that_peft_finds(pattern: str) -> None:
    found = [re.match(rf"(.*\.)?({pattern})$", name) is not None for name in NAMES]
    assert [is_end(pattern, name) for name in NAMES] == found


@pytest.mark.parametrize("pattern", ["(.*)*x", "(a|a)*" * 20 + "x", "(((.*)*)*)*x", "(.*.*.*.*.*.*)*x", "(.?){60}x"])
def test_a_pattern_that_re_would_never_finish_ends(pattern: str) -> None:
    try:
        assert not any(is_whole(pattern, name) or is_end(pattern, name) for name in NAMES)
    except PatternRefused as error:
        assert "takes too long" in str(error)


@pytest.mark.parametrize(
    "pattern", [r"(a)\1", "(?<=a)b", "(?i:a)", "(?>a)", "(", "(" * 500, "a{1,99999999999}", "a" * 1001 + "|"]
)
def test_a_part_that_is_not_followed_refuses_the_pattern(pattern: str) -> None:
    with pytest.raises(PatternRefused):
        check([pattern])
        is_whole(pattern, "aab")


def test_an_adapter_has_few_patterns_and_any_number_of_names() -> None:
    names = [rf"^model\.layers\.{layer}\.self_attn\.q_proj$" for layer in range(1000)]
    assert all(map(is_plain, names)) and not is_plain("(q|v)_proj") and not is_plain("a*")
    check([*names, *(["(q|v)_proj"] * MAX_PATTERNS)])
    with pytest.raises(PatternRefused, match="17 patterns are more than names, and at most 16"):
        check(["(q|v)_proj"] * (MAX_PATTERNS + 1))
