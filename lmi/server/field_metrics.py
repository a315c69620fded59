"""The metrics that are one field of the records in shared memory: a row for each."""

from dataclasses import dataclass

from lmi.shared import state
from lmi.shared.records import Record

MODEL = ("model",)


@dataclass(frozen=True, slots=True)
class FieldMetric:
    """A field as a metric. With the label "model" it is about each model, else about the server.

    Its value is the sum of the field over all records that it is about. Prometheus adds `_total` to
    the name of a counter.
    """

    field: str
    name: str
    help: str
    # Those behind the model are the labels of the field's own counters.
    labels: tuple[str, ...] = ()
    # Whether it is the largest value instead of the sum.
    shows_worst: bool = False
    # Whether a gauge of the record is a counter all the same: it only grows, and begins at 0 with
    # each process.
    is_counter: bool = False

    @property
    def is_of_model(self) -> bool:
        return "model" in self.labels


FIELD_METRICS: dict[type[Record], tuple[FieldMetric, ...]] = {
    state.FrontEndRecord: (
        FieldMetric(
            "num_requests",
            "lmi_requests",
            "Requests ended, without pings and scrapes, by code",
            ("code",),
        ),
        FieldMetric(
            "num_in_flight", "lmi_requests_in_flight", "Requests between admission and end"
        ),
        FieldMetric(
            "num_sequences", "lmi_sequences_in_flight", "Sequences that those requests ask for"
        ),
        FieldMetric("num_body_bytes", "lmi_request_body_bytes", "Request bodies held"),
        FieldMetric("num_open_connections", "lmi_connections_open", "Connections of clients"),
        FieldMetric(
            "loop_lag_s",
            "lmi_event_loop_lag_seconds",
            "Worst lag of a front end's loop",
            shows_worst=True,
        ),
        FieldMetric(
            "num_lost_traces", "lmi_traces_lost", "Traces of requests that no collector took"
        ),
        FieldMetric(
            "request_duration_s",
            "lmi_request_duration_seconds",
            "From the request's arrival to its end",
        ),
        FieldMetric(
            "num_finished",
            "lmi_finished",
            "Generations ended, by finish_reason",
            ("model", "finish_reason"),
        ),
        FieldMetric(
            "num_moved", "lmi_requests_moved", "Requests that went on at another replica", MODEL
        ),
        FieldMetric("num_prompt_tokens", "lmi_prompt_tokens", "Prompt tokens taken in", MODEL),
        FieldMetric(
            "num_cached_tokens",
            "lmi_prompt_tokens_cached",
            "Prompt tokens that an engine had cached",
            MODEL,
        ),
        FieldMetric("num_generated_tokens", "lmi_generated_tokens", "Tokens sent out", MODEL),
        FieldMetric(
            "time_to_first_token_s",
            "lmi_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            MODEL,
        ),
        FieldMetric(
            "inter_token_latency_s",
            "lmi_inter_token_latency_seconds",
            "Between two tokens of one request, of a whole answer on average",
            MODEL,
        ),
        FieldMetric(
            "time_per_output_token_s",
            "lmi_time_per_output_token_seconds",
            "Between two tokens of a whole answer, on average",
            MODEL,
        ),
        FieldMetric(
            "answer_time_s",
            "lmi_answer_time_seconds",
            "From a request's arrival to the end of its answer",
            MODEL,
        ),
        FieldMetric("prompt_length", "lmi_prompt_length_tokens", "Length of a prompt", MODEL),
        FieldMetric(
            "prefill_length",
            "lmi_prefill_length_tokens",
            "Tokens of a prompt that were not cached",
            MODEL,
        ),
        FieldMetric("sequence_length", "lmi_sequence_length_tokens", "Length of a sequence", MODEL),
        FieldMetric(
            "longest_sequence",
            "lmi_longest_sequence_tokens",
            "Length of the longest sequence of an answer",
            MODEL,
        ),
    ),
    state.EngineRecord: (
        FieldMetric("num_running", "lmi_requests_running", "Requests in the batch", MODEL),
        FieldMetric(
            "num_waiting",
            "lmi_requests_waiting",
            "Requests waiting for a place in the batch",
            MODEL,
        ),
        FieldMetric(
            "num_queued",
            "lmi_queue_requests",
            "Requests in front of the engine",
            ("model", "priority"),
        ),
        FieldMetric(
            "num_taken",
            "lmi_engine_requests",
            "Requests that the engine has",
            ("model", "priority"),
        ),
        FieldMetric(
            "num_clients", "lmi_queue_clients", "Clients of whom a request waits or runs", MODEL
        ),
        FieldMetric(
            "num_refused",
            "lmi_queue_refusals",
            "Requests that would have waited, or have waited, too long",
            ("model", "priority"),
        ),
        FieldMetric(
            "wait_error_s",
            "lmi_queue_wait_error_seconds",
            "How far expected waits were off, on average",
            MODEL,
            shows_worst=True,
        ),
        FieldMetric("num_preemptions", "lmi_preemptions", "Sequences put back to make room", MODEL),
        FieldMetric(
            "queue_time_s",
            "lmi_queue_time_seconds",
            "From the arrival at the engine to the first step",
            MODEL,
        ),
        FieldMetric(
            "prefill_time_s",
            "lmi_prefill_time_seconds",
            "From a sequence's first step to its first token",
            MODEL,
        ),
        FieldMetric(
            "decode_time_s",
            "lmi_decode_time_seconds",
            "From a sequence's first token to its last",
            MODEL,
        ),
        FieldMetric("num_drafts", "lmi_drafts", "Drafts of answers", MODEL),
        FieldMetric("num_draft_tokens", "lmi_draft_tokens", "Tokens of drafts", MODEL),
        FieldMetric(
            "num_accepted_tokens",
            "lmi_draft_tokens_accepted",
            "Tokens of drafts that were right",
            MODEL,
        ),
        FieldMetric(
            "step_length",
            "lmi_step_length_tokens",
            "Tokens of prompts and answers in a step",
            MODEL,
        ),
        FieldMetric(
            "step",
            "lmi_engine_steps",
            "Steps of the engines since they started",
            MODEL,
            is_counter=True,
        ),
    ),
    state.SupervisorRecord: (
        FieldMetric(
            "num_engine_restarts", "lmi_engine_restarts", "Engine processes started again", MODEL
        ),
    ),
}
