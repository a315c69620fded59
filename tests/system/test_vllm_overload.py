"""A server with the real vLLM that has more load than it can carry."""

from __future__ import annotations

import pytest

from tests.served import Server
from tests.system.offered_load import alone_and_beside, step_s, wait_s


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_a_light_client_beside_two_hogs_waits_for_no_answer_of_theirs_in_vllm(
    inside: Server,
) -> None:
    """Beside 32 places one is express. An answer of a hog takes 200 steps, and one of the light
    client eight.
    """
    assert inside.engines()[0].max_num_sequences == 32
    _, beside = alone_and_beside(inside)

    assert wait_s(beside) <= 4 * 8 * step_s(beside, 32)
