"""Parameters: one row for each meaning, and the table of those that an API has under its own names.

The checked values of a body that have an effect are `values`, by the names of their rows. From the
rows come what an API reads, refuses, ignores and describes, its words for an engine's refusals, and
the request.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from msgspec import Struct

from lmi.apis.base import readers
from lmi.apis.base.readers import (
    MAX_STOP_SEQUENCES,
    MAX_WORDS,
    Reader,
    boolean,
    integer,
    number,
    strings,
    text,
)
from lmi.errors import InvalidParameter, Unsupported, shorten
from lmi.executor import MAX_PENALTY, MAX_TEMPERATURE, REPETITION_PENALTIES, SamplingConfig
from lmi.types import GenerationRequest

# The most sequences of one prompt.
MAX_SEQUENCES = 16
# The bound of option.max_beam_width. An engine has a lower one.
MAX_BEAMS = 256
# What engines offer. Clients of the LMI API may ask for more with `logprobs`.
MAX_TOP_N_TOKENS = 20
# These have no effect without sampling.
SAMPLING = (
    "seed",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
)
OF_A_SEARCH = ("length_penalty", "early_stopping")
ONE_SEQUENCE_STREAMED = "several sequences come only in an answer that is not streamed"
REQUEST_FIELDS = frozenset(GenerationRequest.__struct_fields__) - {"stop_sequences"}
SAMPLING_FIELDS = frozenset(SamplingConfig.__struct_fields__)

# The values of fields by their names: those of a body, or checked ones by the names of their rows.
ParameterValues = Mapping[str, Any]
Rows = Mapping[str, "Parameter"]


class Parameter(Struct, frozen=True):
    """One meaning. Its value fills the field `name` of GenerationRequest or SamplingConfig, if
    there is one.

    `help` is a sentence for descriptions. `off` holds the values that mean the same as leaving it
    out. `fields` are the engines' names for it, if they differ.
    """

    name: str
    read: Reader
    help: str = ""
    off: tuple[object, ...] = ()
    fields: tuple[str, ...] = ()


def named(*parameters: Parameter) -> dict[str, Parameter]:
    """Return parameters whose names on the wire are their names here."""
    return {row.name: row for row in parameters}


PENALTY = number(-MAX_PENALTY, MAX_PENALTY)
TOKEN_IDS = readers.token_ids(MAX_WORDS)
SIDE = readers.choice(("left", "right"))
ROWS = named(
    Parameter(
        "do_sample",
        boolean,
        "Whether tokens are drawn; otherwise the likeliest one is taken.",
        (False,),
    ),
    Parameter(
        "seed",
        readers.seed,
        "Makes the same request draw the same tokens again; -1 as if left out.",
    ),
    Parameter("temperature", number(0, MAX_TEMPERATURE), "How freely tokens are drawn.", (1,)),
    Parameter(
        "top_k", integer(-1), "Draw from so many likeliest tokens; -1 and 0 mean all.", (-1, 0)
    ),
    Parameter(
        "top_p",
        number(0, 1),
        "Draw from the likeliest tokens with this probability together.",
        (1,),
    ),
    Parameter(
        "min_p",
        number(0, 1),
        "Draw from tokens with at least this share of the likeliest token's probability.",
        (0,),
    ),
    Parameter(
        "typical_p", number(0, 1, low_open=True), "Draw from typical tokens that sum to this.", (1,)
    ),
    Parameter(
        "repetition_penalty",
        number(*REPETITION_PENALTIES),
        "Over 1, tokens so far become less likely.",
        (1,),
    ),
    Parameter(
        "presence_penalty", PENALTY, "Over 0, tokens that the answer has become less likely.", (0,)
    ),
    Parameter(
        "frequency_penalty",
        PENALTY,
        "Over 0, tokens become less likely each time the answer has them.",
        (0,),
    ),
    Parameter(
        "no_repeat_ngram_size", integer(0), "No sequence of so many tokens comes twice.", (0,)
    ),
    Parameter(
        "min_tokens", integer(0), "The answer does not end before it has so many tokens.", (0,)
    ),
    Parameter(
        "max_new_tokens",
        integer(1),
        "The answer ends after so many tokens.",
        fields=("max_tokens",),
    ),
    Parameter(
        "n",
        integer(1, MAX_SEQUENCES),
        "How many answers a prompt gets.",
        (1,),
        ("num_return_sequences",),
    ),
    Parameter(
        "best_of",
        integer(1, MAX_SEQUENCES),
        "How many answers are made.",
        (1,),
        ("num_return_sequences",),
    ),
    Parameter("beam_width", integer(1, MAX_BEAMS), "How many beams a search has.", (1,)),
    Parameter(
        "length_penalty",
        number(0),
        "Over 1, a search prefers long answers; below 1, short ones.",
        (1,),
    ),
    Parameter(
        "early_stopping", boolean, "Whether a search ends with enough complete answers.", (False,)
    ),
    Parameter("stop_sequences", strings(MAX_STOP_SEQUENCES), "Texts that end the answer.", ((),)),
    Parameter(
        "stop_token_ids", TOKEN_IDS, "Tokens that end the answer.", ((),), ("stop_words", "end_ids")
    ),
    Parameter(
        "bad_sequences",
        strings(MAX_WORDS),
        "Texts that the answer must not have.",
        ((),),
        ("bad_words",),
    ),
    Parameter(
        "ignore_eos", boolean, "Whether the answer goes on after the model's end token.", (False,)
    ),
    Parameter(
        "truncate", integer(1), "Keep only so many tokens of the prompt, its last ones by default."
    ),
    Parameter(
        "truncation_side",
        SIDE,
        "Which end of a prompt is cut off that has more tokens than that.",
        ("left",),
    ),
    Parameter(
        "include_stop_str_in_output",
        boolean,
        "Whether the answer keeps the text that ended it.",
        (False,),
    ),
    Parameter("skip_special_tokens", boolean, "Whether the text leaves special tokens out."),
    Parameter(
        "spaces_between_special_tokens",
        boolean,
        "Whether the text has spaces between special tokens.",
    ),
    Parameter(
        "add_special_tokens",
        boolean,
        "Whether the tokenizer adds what begins every text, such as `<s>`.",
    ),
    Parameter("return_full_text", boolean, "Whether the answer begins with the prompt.", (False,)),
    Parameter(
        "details",
        boolean,
        "Whether tokens, log-probs and the end are given.",
        fields=("return_log_probs",),
    ),
    Parameter(
        "num_top_log_probs",
        integer(0),
        "How many alternatives to each token are given, with log-probs.",
        (0,),
    ),
    Parameter(
        "top_n_tokens",
        integer(0, MAX_TOP_N_TOKENS),
        "Alternatives to a token.",
        (0,),
        ("num_top_log_probs",),
    ),
    Parameter(
        "num_prompt_log_probs",
        integer(0),
        "How many alternatives to each token of the prompt are given.",
    ),
    Parameter(
        "decoder_input_details",
        boolean,
        "Whether prompt tokens are given.",
        (False,),
        ("num_prompt_log_probs",),
    ),
    Parameter("adapter", text, "The LoRA adapter that answers.", ("",), ("lora_config",)),
    Parameter(
        "logits_post_processor_name",
        text,
        "The function of `option.logits_post_processors` to use.",
    ),
    Parameter(
        "cache_salt", readers.cache_salt, "Only requests with the same salt share cached prompts."
    ),
)


def rows(*names: str, **names_on_the_wire: str) -> dict[str, Parameter]:
    """Return the rows of these names. A row that a keyword passes has that keyword as its name on
    the wire.
    """
    selected = {name: ROWS[name] for name in names}
    for wire_name, name in names_on_the_wire.items():
        selected[wire_name] = ROWS[name]

    return selected


class ParameterTable(dict[str, Parameter]):
    """The parameters of an API by their names on the wire. `hidden` holds those that no description
    shows.

    `spell` turns a name into the one that an error uses. Several names may have one meaning; the
    first one is told.
    """

    def __init__(
        self, parameters: Rows, spell: Callable[[str], str] = str, hidden: Rows | None = None
    ) -> None:
        super().__init__(parameters)
        self.spell = spell
        self._read_rows = {**self, **(hidden or {})}
        self._wire = {row.name: wire for wire, row in reversed(self.items())}

    @property
    def known_names(self) -> frozenset[str]:
        """What is read, refused, or left out without a word."""
        return frozenset(self._read_rows)

    def wire(self, name: str) -> str:
        """Return the name on the wire of the row `name`."""
        return self._wire.get(name, name)

    def named(self, name: str) -> str:
        """Return the name that an error uses for a row."""
        return self.spell(self.wire(name))

    def wire_names(self, **further_names: str) -> dict[str, str]:
        """Return this API's names for fields of the engines' contract. An engine's refusal is
        reported under them.
        """
        names = dict[str, str]()
        for wire, row in reversed(self.items()):
            for field in row.fields or (row.name,):
                names[field] = self.spell(wire)

        return names | further_names

    def read(self, fields: ParameterValues, ignored: list[str]) -> dict[str, Any]:
        """Check the known fields and return those with an effect. Adds a line to `ignored` for each
        unknown one.

        null means "left out": some clients send it for every name they know.
        """
        values: dict[str, Any] = {}
        for name, value in fields.items():
            if value is None:
                continue

            row = self._read_rows.get(name)
            if row is None:
                ignored.append(f"{self.spell(shorten(name))}: unknown")
                continue

            checked = row.read(self.spell(name), value)
            if checked is not None and checked not in row.off:
                values[row.name] = checked

        return values

    def written(self, fields: ParameterValues) -> set[str]:
        """Return the names of the rows that a body gives a value, also one that means "off"."""
        names = set[str]()
        for name, value in fields.items():
            if value is not None and name in self._read_rows:
                names.add(self._read_rows[name].name)

        return names

    def drop(self, values: dict[str, Any], reasons: Mapping[str, str], ignored: list[str]) -> None:
        """Remove what has no effect, so that no engine refuses it. Adds a line to `ignored` for
        each.
        """
        for name, reason in reasons.items():
            if name in values:
                del values[name]
                ignored.append(f"{self.named(name)}: no effect {reason}")

    def check_together(self, values: ParameterValues, *, is_streamed: bool = False) -> None:
        """Raise an error for values that do not fit together, or for several sequences in a
        streamed answer.
        """
        if values.get("best_of", MAX_SEQUENCES) < values.get("n", 1):
            rule = f"at least n ({values['n']})"
            raise InvalidParameter(self.named("best_of"), rule, values["best_of"])

        limit = values.get("max_new_tokens")
        for name in ("min_length", "min_tokens"):
            if limit is not None and values.get(name, 0) > limit:
                rule = f"at most {self.wire('max_new_tokens')} ({limit})"
                raise InvalidParameter(self.named(name), rule, values[name])

        num_stops = len(values.get("stop_sequences", ())) + len(values.get("stop", ()))
        if num_stops > MAX_STOP_SEQUENCES:
            rule = f"at most {MAX_STOP_SEQUENCES} with {self.wire('stop_sequences')}"
            raise InvalidParameter(self.named("stop"), rule, values["stop"])

        for name in ("beam_width", "n", "best_of"):
            if is_streamed and name in values:
                raise Unsupported(self.named(name), ONE_SEQUENCE_STREAMED)

    def read_search(self, values: dict[str, Any]) -> None:
        """Check the numbers of a beam search, whose answer holds all beams unless `n` asks for
        fewer.
        """
        if "beam_width" not in values:
            return

        width = values["beam_width"]
        name = self.wire("beam_width")
        best_of = values.pop("best_of", width)
        if best_of != width:
            rule = f"equal to {name} ({width}), or left out"
            raise InvalidParameter(self.named("best_of"), rule, best_of)

        if values.get("n", 1) > width:
            raise InvalidParameter(self.named("n"), f"at most {name} ({width})", values["n"])

    @staticmethod
    def without_effect(values: ParameterValues, *, is_greedy: bool) -> dict[str, str]:
        """Return what this way of decoding cannot use, with the reasons. Nothing samples in a
        search.
        """
        if "beam_width" in values:
            return dict.fromkeys(("do_sample", *SAMPLING), "in beam search")

        reasons = dict.fromkeys(OF_A_SEARCH, "without beams")
        if is_greedy:
            reasons |= dict.fromkeys(SAMPLING, "in greedy decoding")

        return reasons


def unknown(fields: ParameterValues, known_names: Collection[str]) -> list[str]:
    """Return a line for the log for each field whose name is not known."""
    lines = []
    for name, value in fields.items():
        if name not in known_names and value is not None:
            lines.append(f"{shorten(name)}: unknown")

    return lines


def in_parameters(name: str) -> str:
    """Return the name that an error uses for a field of `parameters`."""
    return f"parameters.{name}"


def needs_ranking(values: ParameterValues) -> bool:
    """Whether log-probs decide which of several sequences is the answer."""
    return "beam_width" not in values and ("n" in values or "best_of" in values)


def request_of(
    values: ParameterValues, *, is_greedy: bool, is_streaming: bool, **api_fields: Any
) -> GenerationRequest:
    """Build a request from the parameters whose names are its fields. `api_fields` are the fields
    that an API fills itself.
    """
    width = values.get("beam_width", 1)
    sampling = {name: values[name] for name in SAMPLING_FIELDS & values.keys()}
    if width > 1:
        sampling["length_penalty"] = values.get("length_penalty", 1.0)
        sampling["early_stopping"] = int(values.get("early_stopping", False))

    if is_greedy:
        sampling["temperature"] = 0.0

    min_tokens = max(values.get("min_length", 0), values.get("min_tokens", 0))
    sampling["min_tokens"] = min_tokens or None
    sampling["num_return_sequences"] = max(values.get("n", width), values.get("best_of", 1))

    fields = {name: values[name] for name in REQUEST_FIELDS & values.keys()}
    return GenerationRequest(
        sampling=SamplingConfig(**sampling),
        is_streaming=is_streaming,
        stop_sequences=values.get("stop_sequences", ()) + values.get("stop", ()),
        **fields | api_fields,
    )
