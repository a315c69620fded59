"""Where in a client's grammar a fault is."""


def place_in(text: str, offset: int) -> str:
    """Return the line and the column of a character, both from 1, as errors tell them."""
    line = text.count("\n", 0, offset) + 1
    column = offset - text.rfind("\n", 0, offset)
    return f"line {line}, column {column}"
