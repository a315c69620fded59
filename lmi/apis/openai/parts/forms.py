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

# The readers of calls whose name stands in a head of their own.
read_deepseek_v3_call = partial(named_call, head=r"function<｜tool▁sep｜>([\w.:-]+)\n```json\n\s*")
read_deepseek_v31_call = partial(named_call, head=r"([\w.:-]+)<｜tool▁sep｜>\s*")
read_kimi_call = partial(
    named_call,
    head=r"\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*",
)

MARKS = {
    "hermes": Marks(
        read_call=json_call,
        openings=("<tool_call>",),
        closings=("</tool_call>",),
        may_be_bare=True,
    ),
    "deepseek_v3": Marks(
        read_call=read_deepseek_v3_call,
        openings=(DEEPSEEK,),
        call_opening=DEEPSEEK_CALL,
        closings=("```", *DEEPSEEK_ENDS),
    ),
    "deepseek_v31": Marks(
        read_call=read_deepseek_v31_call,
        openings=(DEEPSEEK,),
        call_opening=DEEPSEEK_CALL,
        closings=DEEPSEEK_ENDS,
    ),
    "glm45": Marks(
        read_call=read_glm_call,
        openings=("<tool_call>",),
        closings=("</tool_call>",),
    ),
    "granite": Marks(
        read_call=json_call_list,
        openings=("<|tool_call|>", "<tool_call>"),
        may_be_bare=True,
    ),
    "granite-20b-fc": Marks(
        read_call=json_call,
        openings=("<function_call>",),
        may_be_bare=True,
    ),
    "jamba": Marks(
        read_call=json_call_list,
        openings=("<tool_calls>",),
        closings=("</tool_calls>",),
        may_be_bare=True,
    ),
    "kimi_k2": Marks(
        read_call=read_kimi_call,
        openings=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
        call_opening="<|tool_call_begin|>",
        closings=(
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_section_end|>",
        ),
    ),
    "lfm2": Marks(
        read_call=python_call_list,
        openings=("<|tool_call_start|>[",),
        closings=("<|tool_call_end|>",),
    ),
    "minimax_m2": Marks(
        read_call=read_minimax_call,
        openings=("<minimax:tool_call>",),
        call_opening="<invoke name=",
        closings=("</minimax:tool_call>",),
    ),
    "mistral": Marks(
        read_call=mistral_calls,
        openings=("[TOOL_CALLS]",),
        may_be_bare=True,
    ),
    "phi4_mini_json": Marks(
        read_call=json_call_list,
        openings=("functools", "<|tool_call|>"),
        closings=("<|/tool_call|>",),
        may_be_bare=True,
    ),
    "pythonic": Marks(
        read_call=python_call_list,
        openings=(PYTHON_START + "[", "["),
        closings=(PYTHON_END,),
        only_at_start=True,
    ),
    "qwen3_xml": Marks(
        read_call=read_qwen_call,
        openings=("<tool_call>",),
        call_opening="<function=",
        closings=("</tool_call>",),
    ),
    "seed_oss": Marks(
        read_call=read_qwen_call,
        openings=("<seed:tool_call>",),
        call_opening="<function=",
        closings=("</seed:tool_call>",),
    ),
}
# The readers of whole answers, by the names of their forms.
PARSERS: dict[str, Read] = {
    **{form: partial(marked_calls, marks=marks) for form, marks in MARKS.items()},
    "json": json_calls,
}
# lmi/chats/tools.py asks for this form.
PARSERS["generic"] = PARSERS["hermes"]
