"""The loop around any engine's step."""

from __future__ import annotations

from handlers.echo import EchoExecutor
from handlers.stepped import Step
from lmi.config import EngineConfig
from lmi.executor import FinishReason, Request, Response

TIMEOUT_S = 30.0


class Late(EchoExecutor):
    """Tells of every step twice, as one that gets the outputs of two steps of another process together."""

    def _step(self) -> Step:
        step = super()._step()
        step.touched *= 2
        return step


def test_a_sequence_that_is_told_of_twice_in_a_step_ends_once_and_hurts_nobody() -> None:
    with Late(EngineConfig(handler="echo", options={"echo_step_ms": "1"})) as executor:
        for _ in range(2):
            request_id = executor.enqueue_request(Request(input_token_ids=(5, 6), max_tokens=3))
            [response] = executor.await_responses(request_id, TIMEOUT_S)
            assert isinstance(response, Response) and response.result is not None, response
            assert response.result.output_token_ids == [[5, 6, 5]]
            assert response.result.finish_reasons == [FinishReason.LENGTH]
        assert sum(step.num_completed_requests for step in executor.get_latest_iteration_stats()) == 2
