"""What a Result carries beside token ids."""

from __future__ import annotations

import msgspec

from lmi.executor.checks import check_int


class AdditionalModelOutput(msgspec.Struct, frozen=True):
    """A tensor of the model by its name: its rows for generated tokens, and with `gather_context` for the prompt's."""

    name: str
    gather_context: bool = False


class _Flags(msgspec.Struct, frozen=True):
    """The positional arguments of an OutputConfig, in upstream's order."""

    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: tuple[AdditionalModelOutput, ...] = ()


class OutputConfig(_Flags, frozen=True, kw_only=True):
    """The outputs that a Result carries beside the token ids.

    `num_top_log_probs` and `num_prompt_log_probs` say how many best alternatives each generated token and each prompt
    token gets; upstream does not have them. With `num_prompt_log_probs` 0 a Result has only the log-probs of the prompt
    tokens, with None it has none. Inside lmi the prompt is always excluded from the output.
    """

    num_top_log_probs: int = 0
    num_prompt_log_probs: int | None = None

    def __post_init__(self) -> None:
        check_int("num_top_log_probs", self.num_top_log_probs, 0)
        check_int("num_prompt_log_probs", self.num_prompt_log_probs, 0)
