"""Deliberate mistakes in the adapter, and what must find each: mypy over the stubs, or a scene of the battery.

A mistake replaces a piece of the source text, which must be there exactly once: where the adapter has changed, the
mistake has to be written anew, and its test says so by its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tests.handlers.trtllm.stubs import FOLDER

STATIC = "mypy"


class Gone(AssertionError):
    """A mistake no longer applies to the text."""


class Run(msgspec.Struct, frozen=True):
    """`folder` has the package lmi_trtllm of the adapter to run; "" is the adapter itself."""

    name: str
    scene: str
    profile: str
    folder: str = ""


class Outcome(msgspec.Struct, frozen=True):
    """`answer` is what the scene returned, or how the child ended."""

    name: str
    answer: Any


@dataclass(frozen=True)
class Mutation:
    name: str
    module: str
    old: str
    new: str
    found_by: str  # STATIC or a scene
    profile: str = "main-2026-08"  # of the scene

    def text(self, folder: Path = FOLDER) -> str:
        """The module's text with the mistake. Raises Gone."""
        text = (folder / f"{self.module}.py").read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise Gone(f"the mistake {self.name!r}: {self.module}.py has {self.old!r} {text.count(self.old)} times")
        return text.replace(self.old, self.new)


MUTATIONS = [
    Mutation("a wrong keyword", "engine", "streaming=work", "stream=work", STATIC),
    Mutation(
        "arguments by position",
        "engine",
        'inputs={"prompt_token_ids": work.token_ids},',
        '{"prompt_token_ids": work.token_ids}, work.params, None,',
        STATIC,
    ),
    Mutation(
        "a keyword of SamplingParams that is another engine's",
        "sampling",
        "max_tokens=int(",
        "max_new_tokens=int(",
        STATIC,
    ),
    Mutation(
        "a keyword that is given twice",
        "sampling",
        'given["no_repeat_ngram_size"] =',
        'given["detokenize"] =',
        "changed_logits",
    ),
    Mutation("an attribute of another engine", "outputs", "output.cached_tokens", "output.num_cached_tokens", STATIC),
    Mutation("a log-prob read by another name", "outputs", "entry[token_id].logprob", "entry[token_id].value", STATIC),
    Mutation(
        "a name that its module does not export",
        "outputs",
        "from tensorrt_llm.llmapi import",
        "from tensorrt_llm import",
        STATIC,
    ),
    Mutation("an adapter's path by another name", "adapters", "lora_path=adapter.path", "path=adapter.path", STATIC),
    Mutation(
        "an argument of the LLM that is none", "arguments", '{"guided_decoding_backend"', '{"guided_backend"', "tokens"
    ),
    Mutation(
        "a priority on main of October 2025",
        "executor",
        "if self._profile.takes_priority:",
        "if True:",
        "keywords",
        "main-2025-10",
    ),
    Mutation("a private name", "engine", "if not output.finished:", "if not output._done:", STATIC),
    Mutation("a lost await", "guides", "await asyncio.shield(", "asyncio.shield(", "wrong_structure"),
    Mutation(
        "a structure that nobody checks",
        "engine",
        "if guide is not None and self._guides is not None:",
        "if False:",
        "wrong_structure",
    ),
    Mutation(
        "a cancelled request that goes on",
        "engine",
        "                    output.abort()",
        "                    pass",
        "cancelled",
    ),
    Mutation(
        "log-probs that are off by one",
        "outputs",
        "(completion.logprobs or [])[self._num_read :]",
        "(completion.logprobs or [])[self._num_read + 1 :]",
        "log_probs",
    ),
    Mutation(
        "log-probs of a search that streams",
        "executor",
        "if sequence.search is not None and",
        "if False and",
        "beams",
    ),
    Mutation(
        "the prompt's log-probs off by one",
        "outputs",
        "torch.tensor(token_ids[1:]",
        "torch.tensor(token_ids[:-1]",
        "prompt_log_probs",
        "main-2025-10",
    ),
    Mutation(
        "parameters that sequences share",
        "executor",
        "params = sampling_params(sequence, self._sampler, functions)",
        'params = self.__dict__.setdefault("shared", sampling_params(sequence, self._sampler, functions))',
        "many",
    ),
    Mutation(
        "a seed that sequences share",
        "sampling",
        "sequence.seed, sampler)",
        "request.sampling_config.seed or 0, sampler)",
        "many",
    ),
    Mutation(
        "a request that samples and becomes greedy",
        "sampling",
        '{"temperature": temperature, **chosen}',
        "chosen",
        "many",
    ),
    Mutation(
        "a refusal that nobody hears of",
        "engine",
        "except OF_ONE_REQUEST as error:\n            self._loop.put(SequenceOutput(work.id, [], end=error))",
        'except OF_ONE_REQUEST as error:\n            log.error("%s", error)',
        "refused",
    ),
    Mutation(
        "a refusal that ends the engine", "engine", "OF_ONE_REQUEST = (RequestError, ", "OF_ONE_REQUEST = (", "refused"
    ),
    Mutation(
        "an engine's death taken for one request's fault",
        "engine",
        "except OF_ONE_REQUEST as error",
        "except Exception as error",
        "death",
    ),
    Mutation(
        "an end token that comes twice",
        "outputs",
        " or (token_ids and token_ids[-1] in (end_id, *stop_token_ids(sequence)))",
        "",
        "beams",
    ),
    Mutation(
        "an end token that the engine dropped and nobody misses",
        "outputs",
        "return [] if token_id is None else [token_id]",
        "return []",
        "end_token",
    ),
    Mutation("an end token of the tokenizer in place of none", "sampling", "NO_END = -1", "NO_END = 0", "no_end"),
    Mutation("a cursor that stays", "outputs", "self._num_read += len(new)", "self._num_read += 0", "tokens"),
    Mutation(
        "beams that are appended",
        "outputs",
        "list(completion.token_ids or ())\n    log_probs",
        "list(completion.token_ids_diff)\n    log_probs",
        "beams",
    ),
    Mutation(
        "a bias that is lost",
        "sampling",
        "embedding_bias(request, sampler.vocab_size)",
        "None",
        "changed_logits",
    ),
    Mutation("a salt that is lost", "executor", "if salt is not None:", "if False:", "keywords"),
    Mutation("a duration in another unit", "sampling", "timedelta(milliseconds=", "timedelta(seconds=", "keywords"),
    Mutation("an engine that outlives its executor", "engine", "self._llm.shutdown()", "pass", "shut_down"),
]
