"""The format of an answer at the APIs of OpenAI and Anthropic: what a request asks to be told, and
in which form.
"""

from typing import Any

from msgspec import field

from lmi.apis.openai.tools import Tools
from lmi.settings.config import ModelConfig
from lmi.types import AnswerFormat

# The form of gpt-oss: a word of option.tool_call_parser and of option.reasoning_parser.
HARMONY = "openai"


class OpenAIFormat(AnswerFormat, frozen=True, kw_only=True):
    """The format of an answer. Its fields are the server's settings until the parameters of the
    request are checked.
    """

    # The name of the model in the answer: that of the adapter if the request names one.
    model: str
    adapter: str | None = None
    # Whether `adapters` of the body names the adapter, and not `model`.
    is_adapter_named: bool = False
    # Whether a stream's last chunk reports the usage.
    has_usage: bool = False
    # Whether the chunks before it report the usage so far.
    has_running_usage: bool = False
    has_token_ids: bool = False
    has_log_probs: bool = False
    num_prompt_log_probs: int | None = None
    # Whether log-probs name tokens by their ids.
    names_tokens_by_id: bool = False
    # The number of sequences of each prompt that the answer has.
    num_choices: int = 1
    # If not, the answer is the prompt alone, for its log-probs.
    is_answer_wanted: bool = True
    # Whether the whole text is a list of calls or, if a `function` must be called, the arguments of
    # that one call.
    is_forced: bool = False
    function: str | None = None
    # The form in which the model writes other calls in its text. None: calls are not looked for.
    tool_calls: str | None = None
    # The form in which the model writes thoughts in its text. None: thoughts are not looked for.
    reasoning: str | None = None
    # Whether the answer shows the thoughts that are found. If not, they are left out.
    has_thoughts: bool = True
    # Of embeddings alone: whether they are the bytes of float32, little-endian, and not numbers.
    is_base64: bool = False
    # The tools by their names, which have the types of a call's arguments.
    tools: Tools = field(default_factory=dict)
    # Of Responses alone: the ResponseState. It changes, so that an error knows how much is written.
    state: Any = None

    @property
    def holds_fields(self) -> bool:
        """Whether it keeps fields of the body in memory as they came."""
        return bool(self.tools) or self.state is not None


def default_format(model: ModelConfig) -> OpenAIFormat:
    """Return the format for a body that asks for nothing, and for one that cannot be read."""
    tool_calls = model.tool_call_parser
    reasoning = model.reasoning_parser
    return OpenAIFormat(
        model=model.name,
        tool_calls=None if tool_calls == "none" else tool_calls,
        reasoning=None if reasoning == "none" else reasoning,
    )
