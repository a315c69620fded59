"""Limits, rules between parameters, and the building of a request, which the schemas share.

`given` holds the checked parameters of one body that have an effect, under the names that most APIs have for them.
`named` turns such a name into the name that an error uses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lmi.apis.base.readers import MAX_STOP_SEQUENCES, Reader
from lmi.errors import InvalidParameter, Unsupported, shorten
from lmi.executor import SamplingConfig
from lmi.types import GenerationRequest

MAX_SEQUENCES = 16  # of one prompt
MAX_IGNORED = 32  # lines for the log of one request
MAX_TOP_N_TOKENS = 20  # what engines offer; clients of the LMI API may ask for more with logprobs
ONE_SEQUENCE_STREAMED = "several sequences come only in an answer that is not streamed"

Given = Mapping[str, Any]
Named = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Parameter:
    """The reader of a parameter, and the values that mean the same as leaving it out."""

    read: Reader
    off: tuple[object, ...] = ()


def unknown(fields: Given, known: Collection[str]) -> list[str]:
    """Return a line for the log for each field that is not in `known`."""
    return [f"{shorten(name)}: unknown" for name, value in fields.items() if name not in known and value is not None]


def in_parameters(name: str) -> str:
    """Return the name that an error uses for a field of `parameters`."""
    return f"parameters.{name}"


def read_parameters(parameters: Given, table: Mapping[str, Parameter], ignored: list[str]) -> dict[str, Any]:
    """Check the known parameters and return those with an effect. Adds a line to `ignored` for each unknown one."""
    given: dict[str, Any] = {}
    for name, value in parameters.items():
        parameter = table.get(name)
        if value is None:
            continue  # left out; some clients send null for every name they know
        if parameter is None:
            ignored.append(f"{in_parameters(shorten(name))}: unknown")
        elif (checked := parameter.read(in_parameters(name), value)) not in parameter.off:
            given[name] = checked
    return given


def drop(given: dict[str, Any], reasons: Mapping[str, str], ignored: list[str], named: Named = str) -> None:
    """Remove names without effect, so that no engine refuses them. Adds a line to `ignored` for each."""
    for name, reason in reasons.items():
        if name in given:
            del given[name]
            ignored.append(f"{named(name)}: no effect {reason}")


def check_best_of(given: Given, named: Named = str) -> None:
    if given.get("best_of", MAX_SEQUENCES) < given.get("n", 1):
        raise InvalidParameter(named("best_of"), f"at least n ({given['n']})", given["best_of"])


def check_one_sequence(given: Given, named: Named, width: str) -> None:
    """Raise Unsupported if a streamed answer asks for several sequences. `width` is the name of a beam search's."""
    for name in (width, "n", "best_of"):
        if name in given:
            raise Unsupported(named(name), ONE_SEQUENCE_STREAMED)


def check_least_tokens(
    given: Given, names: Iterable[str], limit_name: str, limit: int | None, named: Named = str
) -> None:
    """Raise InvalidParameter if a least number of tokens is over `limit`, the value of `limit_name`."""
    for name in names:
        if limit is not None and given.get(name, 0) > limit:
            raise InvalidParameter(named(name), f"at most {limit_name} ({limit})", given[name])


def check_stop(given: Given, other: str, named: Named) -> None:
    """Raise InvalidParameter if `stop` and the parameter `other` together hold too many stop sequences."""
    if len(given.get(other, ())) + len(given.get("stop", ())) > MAX_STOP_SEQUENCES:
        raise InvalidParameter(named("stop"), f"at most {MAX_STOP_SEQUENCES} with {other}", given["stop"])


def sampling_config(given: Given, *, is_greedy: bool) -> SamplingConfig:
    width = given.get("beam_width", 1)
    return SamplingConfig(
        width,
        num_return_sequences=max(given.get("n", width), given.get("best_of", 1)),
        temperature=0.0 if is_greedy else given.get("temperature"),
        top_k=given.get("top_k"),
        top_p=given.get("top_p"),
        min_p=given.get("min_p"),
        typical_p=given.get("typical_p"),
        seed=given.get("seed"),
        min_tokens=max(given.get("min_length", 0), given.get("min_tokens", 0)) or None,
        repetition_penalty=given.get("repetition_penalty"),
        presence_penalty=given.get("presence_penalty"),
        frequency_penalty=given.get("frequency_penalty"),
        no_repeat_ngram_size=given.get("no_repeat_ngram_size"),
        length_penalty=given.get("length_penalty", 1.0) if width > 1 else None,
        early_stopping=int(given.get("early_stopping", False)) if width > 1 else None,
    )


def needs_ranking(request: GenerationRequest) -> bool:
    """Whether log-probs decide which of several sequences is the answer."""
    return request.num_sequences > 1 and not request.is_beam_search


def shared_request(
    given: Given, *, max_new_tokens: int | None, is_greedy: bool, is_streaming: bool
) -> GenerationRequest:
    """Build a request from the fields that have one name in all APIs. Each schema replaces the other fields."""
    return GenerationRequest(
        max_new_tokens=max_new_tokens,
        sampling=sampling_config(given, is_greedy=is_greedy),
        is_streaming=is_streaming,
        stop_token_ids=given.get("stop_token_ids", ()),
        ignore_eos=given.get("ignore_eos", False),
        truncate=given.get("truncate"),
        include_stop_str_in_output=given.get("include_stop_str_in_output", False),
        skip_special_tokens=given.get("skip_special_tokens", True),
        spaces_between_special_tokens=given.get("spaces_between_special_tokens", True),
        cache_salt=given.get("cache_salt"),
        logits_post_processor_name=given.get("logits_post_processor_name"),
    )
