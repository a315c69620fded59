"""llguidance's matcher, which follows a guide within the limits of all."""

import re

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# llguidance's word for a place at which no token is allowed.
DEAD_END = "NoExtension"
NO_TEXT = "no text of this vocabulary fits it"
# A place in a text of Lark, which the client knows only if it wrote it.
PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=30_000,
    step_max_items=10_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    # Else an error would show the answer.
    verbose_errors=False,
)


def new_matcher(tokenizer: LLTokenizer, text: str, *, has_places: bool = False) -> LLMatcher:
    """Raises ValueError if llguidance cannot follow the text, with the place in it where the client
    wrote it.
    """
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise ValueError(reason_of(matcher, has_places=has_places))

    return matcher


def reason_of(matcher: LLMatcher, *, has_places: bool = False) -> str:
    """Why a matcher has failed, without the lines that show the client's text or llguidance's form
    of it.
    """
    lines = []
    for line in matcher.get_error().splitlines():
        if line.strip() and "<non-verbose/>" not in line:
            lines.append(line)

    first_line = lines[0] if lines else ""
    if first_line.startswith(DEAD_END):
        return NO_TEXT

    place = PLACE.match(first_line)
    where = ""
    if place is not None and has_places:
        where = f"line {place[1]}, column {place[2]}: "

    for line in lines:
        if line.startswith("error: "):
            return f"{where}its regular expression: {line.removeprefix('error: ')}"

    return where + PLACE.sub("", first_line)
