"""The bounds of the histograms in shared memory.

Those of phases, first tokens and later tokens are vLLM's, after a few smaller ones, so that its
metrics can be made of ours (`server/twins.py`).
"""

# From the arrival of a request to its end.
LATENCY_BOUNDS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
)
# From one stage of an answer to another.
PHASE_BOUNDS_S = (
    0.001,
    0.003,
    0.01,
    0.03,
    0.1,
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
)
# From the arrival of a request to its first token.
FIRST_TOKEN_BOUNDS_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
# From one token to the next.
INTER_TOKEN_BOUNDS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
# The tokens of a step.
STEP_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# The tokens of a prompt or an answer: 1, 2, 5, 10 and so on, to 500,000.
LENGTH_BOUNDS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
