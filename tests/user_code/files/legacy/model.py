"""An output formatter of the first signature, named by option.output_formatter."""

from djl_python.request_io import Token


def custom(
    token: Token, first_token: bool, last_token: bool, details: dict, generated_tokens: str, id: int
):
    start = "<" if first_token else ""
    return (
        start
        + token.text
        + (f">{details['finish_reason']} {generated_tokens}" if last_token else "")
    )
