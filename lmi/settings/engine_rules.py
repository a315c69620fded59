"""Rules between two options of an engine, whichever engine it is."""

from lmi.settings.steps import Resolution

BATCH = "option.max_rolling_batch_size"
BEAMS = "option.max_beam_width"
PREFIX_CACHE_DIR = "option.prefix_cache_dir"
PREFIX_CACHE_SCOPE = "option.prefix_cache_scope"


def bound_beams(resolution: Resolution) -> None:
    """Let a beam search have no more beams than sequences run at once."""
    values = resolution.values
    max_sequences = values.final(BATCH)
    if max_sequences is None or values.final(BEAMS) <= max_sequences:
        return

    if BEAMS in values:
        values.refuse(BEAMS, f"at most {BATCH}, {max_sequences}")
        return

    values.choose(BEAMS, max_sequences, BATCH)


def check_stored_prompts(resolution: Resolution) -> None:
    """Refuse a folder for cached prompts if no request may use those of another."""
    values = resolution.values
    if values.final(PREFIX_CACHE_SCOPE) == "request" and values.given(PREFIX_CACHE_DIR):
        values.refuse(PREFIX_CACHE_DIR, f"none beside {PREFIX_CACHE_SCOPE}=request")
