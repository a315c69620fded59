"""The format of an answer at the APIs of OpenAI and Anthropic: what a request wants to be told, and
how.
"""

from dataclasses import dataclass, field
from typing import Any

from lmi.apis.openai.tools import Tools
from lmi.settings.config import ModelConfig
from lmi.types import AnswerFormat

# The form of both tool calls and reasoning.
HARMONY = "openai"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIFormat(AnswerFormat):
    """The format of an answer, which holds `num_choices` sequences of each prompt.

    `model` equals `adapter` if the request names one, by `adapters` if `is_adapter_named`, else by
    `model`. With `is_forced` the whole text is a list of calls, or the arguments of the one
    `function` that the model must call. `tool_calls` is the form of other calls in the text,
    `reasoning` that of thoughts. Both are the server's settings until the parameters are checked.
    """

    model: str
    adapter: str | None = None
    is_adapter_named: bool = False
    # A stream's last chunk reports the usage.
    has_usage: bool = False
    # The chunks before it report the usage so far.
    has_running_usage: bool = False
    has_token_ids: bool = False
    has_log_probs: bool = False
    num_prompt_log_probs: int | None = None
    # Log-probs name tokens by their ids.
    names_tokens_by_id: bool = False
    num_choices: int = 1
    # If not, the answer is the prompt alone, for its log-probs.
    is_answer_wanted: bool = True
    function: str | None = None
    is_forced: bool = False
    tool_calls: str | None = None
    reasoning: str | None = None
    # If not, thoughts are told apart and left out.
    has_thoughts: bool = True
    # Embeddings are the bytes of float32, little-endian, in place of numbers.
    is_base64: bool = False
    # The tools by their names, for the types of arguments.
    tools: Tools = field(default_factory=dict, compare=False, repr=False)
    # The state of a response. It changes, so that an error knows how much is written.
    state: Any = field(default=None, compare=False)

    @property
    def holds_fields(self) -> bool:
        """Whether it holds fields of the body, as they came."""
        return bool(self.tools) or self.state is not None


def default_format(model: ModelConfig) -> OpenAIFormat:
    """Return the format of a body that says nothing of it, and of one that cannot be read."""
    tool_calls = model.tool_call_parser
    reasoning = model.reasoning_parser
    return OpenAIFormat(
        model=model.name,
        tool_calls=None if tool_calls == "none" else tool_calls,
        reasoning=None if reasoning == "none" else reasoning,
    )
