"""The forms of calls in an answer, by the names that vLLM gives them. A form is a row."""

from functools import partial

from lmi.apis.openai.parts.bare_calls import json_calls
from lmi.apis.openai.parts.buffer import Read
from lmi.apis.openai.parts.json_calls import json_call, json_call_list, mistral_calls, named_call
from lmi.apis.openai.parts.marked_calls import Marks, marked_calls
from lmi.apis.openai.parts.python_calls import python_call_list
from lmi.apis.openai.parts.tagged_calls import read_glm_call, read_minimax_call, read_qwen_call

# Llama 4 writes these around its calls.
PYTHON_START = "<|python_start|>"
PYTHON_END = "<|python_end|>"
DEEPSEEK = "<｜tool▁calls▁begin｜>"
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
DEEPSEEK_ENDS = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
read_deepseek_v3_call = partial(named_call, head=r"function<｜tool▁sep｜>([\w.:-]+)\n```json\n\s*")
read_deepseek_v31_call = partial(named_call, head=r"([\w.:-]+)<｜tool▁sep｜>\s*")
KIMI_HEAD = r"\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*"
# A model writes one of these.
KIMI_STARTS = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_section_begin|>",
)
KIMI_ENDS = ("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_section_end|>")
FUNCTION_TAG = "<function="
INVOKE_TAG = "<invoke name="
MARKS = {
    "hermes": Marks(("<tool_call>",), json_call, ("</tool_call>",), may_be_missing=True),
    "deepseek_v3": Marks(
        (DEEPSEEK,), read_deepseek_v3_call, ("```", *DEEPSEEK_ENDS), DEEPSEEK_CALL
    ),
    "deepseek_v31": Marks((DEEPSEEK,), read_deepseek_v31_call, DEEPSEEK_ENDS, DEEPSEEK_CALL),
    "glm45": Marks(("<tool_call>",), read_glm_call, ("</tool_call>",)),
    "granite": Marks(("<|tool_call|>", "<tool_call>"), json_call_list, may_be_missing=True),
    "granite-20b-fc": Marks(("<function_call>",), json_call, may_be_missing=True),
    "jamba": Marks(("<tool_calls>",), json_call_list, ("</tool_calls>",), may_be_missing=True),
    "kimi_k2": Marks(
        KIMI_STARTS, partial(named_call, head=KIMI_HEAD), KIMI_ENDS, "<|tool_call_begin|>"
    ),
    "lfm2": Marks(("<|tool_call_start|>[",), python_call_list, ("<|tool_call_end|>",)),
    "minimax_m2": Marks(
        ("<minimax:tool_call>",), read_minimax_call, ("</minimax:tool_call>",), INVOKE_TAG
    ),
    "mistral": Marks(("[TOOL_CALLS]",), mistral_calls, may_be_missing=True),
    "phi4_mini_json": Marks(
        ("functools", "<|tool_call|>"),
        json_call_list,
        ("<|/tool_call|>",),
        may_be_missing=True,
    ),
    "pythonic": Marks((PYTHON_START + "[", "["), python_call_list, (PYTHON_END,), open_answer=True),
    "qwen3_xml": Marks(("<tool_call>",), read_qwen_call, ("</tool_call>",), FUNCTION_TAG),
    "seed_oss": Marks(("<seed:tool_call>",), read_qwen_call, ("</seed:tool_call>",), FUNCTION_TAG),
}
# The readers of whole answers, by the names of their forms.
PARSERS: dict[str, Read] = {
    **{form: partial(marked_calls, marks=marks) for form, marks in MARKS.items()},
    "json": json_calls,
}
# lmi/chats/tools.py asks for this form.
PARSERS["generic"] = PARSERS["hermes"]
