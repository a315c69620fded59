"""What the embedded engine takes where no option says it, and what it can round weights to.

It stands apart from `about.py`, so that an engine imports none of the settings' tables.
"""

# A smaller batch is taken where it makes as many tokens/s on this machine.
MAX_NUM_SEQUENCES = 64
# Tokens of prompts in one step.
MAX_PREFILL_TOKENS = 1024
QUANTIZE_METHODS = frozenset({"int4", "int8"})
