"""The worker: a thread that gives every active request a token in each step, like upstream's
executor loop.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tests.handlers.trtllm.double.guide import Guide, Guides
from tests.handlers.trtllm.double.jobs import Job
from tests.handlers.trtllm.double.knobs import Knobs, current
from tests.handlers.trtllm.double.prefixes import Prefixes
from tests.handlers.trtllm.double.responses import Channel, Death, News, Refusal, deliver

# After which an idle engine looks at the knobs
IDLE_S = 0.02
MAX_STATS = 1000

# As top and ps show it
RANK = "double-rank"
# It ends with the process that started it, as Open MPI's daemon sees to.
WORKER = (
    f"import sys; open('/proc/self/comm', 'w').write('{RANK}'); print(flush=True); sys.stdin.read()"
)

log = logging.getLogger("tensorrt_llm")


class Engine:
    """Any thread may call what has no underscore."""

    def __init__(
        self,
        *,
        max_batch_size: int,
        stream_interval: int,
        prefixes: Prefixes,
        guides: Callable[[], Guides] | None,
        shared_generator: torch.Generator | None,
        keeps_stats: bool,
        num_ranks: int,
    ) -> None:
        # Of which the engine died
        self.error: Exception | None = None
        self.stats: deque[dict[str, Any]] = deque(maxlen=MAX_STATS)
        self._max_batch_size = max_batch_size
        self._stream_interval = stream_interval
        self._prefixes = prefixes
        self._make_guides = guides
        self._guides: Guides | None = None
        self._shared_generator = shared_generator
        self._keeps_stats = keeps_stats
        self._lock = threading.Condition()
        self._queue: list[Job] = []
        self._active: list[Job] = []
        self._refused: list[tuple[Channel, News]] = []
        self._num_steps = self._num_failed = 0
        self._is_closed = False
        self._workers = [_new_worker() for _ in range(num_ranks)] if current().has_workers else []
        self._thread = threading.Thread(target=self._run, name="trtllm-double", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        with self._lock:
            self._queue.append(job)
            self._queue.sort(key=lambda one: (-one.priority, one.id))
            self._lock.notify()

    def refuse(self, channel: Channel, message: str) -> None:
        """Give a request an error in place of news."""
        with self._lock:
            self._refused.append((channel, Refusal(message)))
            self._lock.notify()

    def abort(self, request_id: int) -> bool:
        """Cancel a request with the next step. Returns False if it has ended."""
        with self._lock:
            jobs = [queued for queued in self._queue + self._active if queued.id == request_id]
            for job in jobs:
                job.is_cancelled = True

            self._lock.notify()

        return bool(jobs)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._lock.notify()

        self._thread.join()
        for worker in self._workers:
            worker.kill()
            worker.communicate()

    def count_failure(self) -> None:
        self._num_failed += 1

    # The loop.

    def _run(self) -> None:
        while not self._is_closed and self.error is None:
            with self._lock:
                if not (self._queue or self._active or self._refused):
                    self._lock.wait(IDLE_S)

            knobs = current()
            started = time.monotonic()
            if knobs.hangs or any(worker.poll() is not None for worker in self._workers):
                time.sleep(IDLE_S)
            elif reason := self._death(knobs):
                self._die(RuntimeError(reason))
            elif self._queue or self._active or self._refused:
                deliver(self._step(knobs))
                time.sleep(max(0.0, knobs.step_s - (time.monotonic() - started)))

    def _death(self, knobs: Knobs) -> str:
        """The reason for which the engine ends now, or ""."""
        if knobs.dies_after_steps is not None and self._num_steps >= knobs.dies_after_steps:
            return "a worker process ended"

        if knobs.error_budget is not None and self._num_failed > knobs.error_budget:
            return "the error budget is exhausted"

        return knobs.dies

    def _die(self, error: Exception) -> None:
        with self._lock:
            self.error = error
            channels = [job.channel for job in self._queue + self._active] + [
                refused_channel for refused_channel, _ in self._refused
            ]
            self._queue = []
            self._active = []
            self._refused = []

        deliver((channel, Death(error)) for channel in channels)

    def _step(self, knobs: Knobs) -> list[tuple[Channel, News]]:
        self._num_steps += 1
        started = time.monotonic()
        with self._lock:
            news, self._refused = self._refused, []
            news += self._cancelled(knobs)
            news += self._admitted()
            active = list(self._active)

        num_context = sum(job.num_iterations == 0 for job in active)
        try:
            for job in active:
                for _ in range(knobs.tokens_per_step):
                    job.advance(knobs)
        except Exception as error:
            # A step fails for every request in it
            log.exception("a step failed")
            news += self._fail(active, str(error))
        else:
            news += self._told(active, knobs)

        if self._keeps_stats:
            self._note(active, num_context, started, knobs)

        return news

    def _cancelled(self, knobs: Knobs) -> list[tuple[Channel, News]]:
        """End the requests that were cancelled, in the way that the knobs say."""
        due = []
        for job in [news for news in self._queue + self._active if news.is_cancelled]:
            job.cancelled_at = job.cancelled_at or self._num_steps
            if (
                knobs.finish_after_abort == "late"
                and self._num_steps - job.cancelled_at < knobs.late_steps
            ):
                continue

            due.append(job)

        self._forget(due)
        if knobs.finish_after_abort == "never":
            return []

        return [(job.channel, news) for job in due for news in job.cancelled()]

    def _admitted(self) -> list[tuple[Channel, News]]:
        """Begin the first requests of the queue that find slots. Only one beam width runs at a
        time.
        """
        news: list[tuple[Channel, News]] = []
        while self._queue and self._fits(self._queue[0]):
            job = self._queue.pop(0)
            job.num_cached = self._prefixes.num_known(job.cache_key, job.prompt)
            try:
                job.begin(lambda job=job: self._guide(job), self._shared_generator)  # type: ignore[misc]
            except Exception as error:
                news += self._fail([job], str(error))
            else:
                self._active.append(job)

        return news

    def _fits(self, job: Job) -> bool:
        num_taken = sum(active_job.num_slots for active_job in self._active)
        is_alike = all(active_job.width == job.width for active_job in self._active)
        return is_alike and (not self._active or num_taken + job.num_slots <= self._max_batch_size)

    def _guide(self, job: Job) -> Guide | None:
        if self._make_guides is None or job.params.guided_decoding is None:
            return None

        self._guides = self._guides or self._make_guides()
        return self._guides.guide(job.params.guided_decoding, job.params.end_id)

    def _told(self, active: Iterable[Job], knobs: Knobs) -> list[tuple[Channel, News]]:
        news: list[tuple[Channel, News]]
        news = [
            (job.channel, news_item)
            for job in active
            for news_item in job.news(self._stream_interval, knobs.tokens_per_step)
        ]
        self._forget([job for job in active if job.is_over])
        return news[::-1] if knobs.is_reversed else news

    def _fail(self, jobs: list[Job], message: str) -> list[tuple[Channel, News]]:
        self._num_failed += len(jobs)
        self._forget(jobs)
        return [(job.channel, Refusal(message)) for job in jobs]

    def _forget(self, jobs: list[Job]) -> None:
        with self._lock:
            for job in jobs:
                if job in self._active:
                    self._active.remove(job)
                    longest = max(
                        (sequence.tokens for sequence in job.sequences), key=len, default=[]
                    )
                    self._prefixes.note(job.cache_key, [*job.prompt, *longest][:-1])
                else:
                    self._queue = [sequence for sequence in self._queue if sequence is not job]

    def _note(self, active: list[Job], num_context: int, started: float, knobs: Knobs) -> None:
        stats = {
            "iter": self._num_steps,
            "iterLatencyMS": (time.monotonic() - started) * 1000,
            "timestamp": time.strftime("%m-%d-%Y %H:%M:%S"),
            "numActiveRequests": len(self._active),
            "numQueuedRequests": len(self._queue),
            "numCompletedRequests": len(active) - len(self._active),
            "maxNumActiveRequests": self._max_batch_size,
            "kvCacheStats": self._prefixes.stats(sum(len(job.prompt) for job in self._active)),
            "inflightBatchingStats": {
                "numScheduledRequests": len(active),
                "numContextRequests": num_context,
                "numGenRequests": len(active) - num_context,
                "numPausedRequests": 0,
                "numCtxTokens": sum(len(job.prompt) for job in active if job.num_iterations == 1),
                "microBatchId": 0,
                "avgNumDecodedTokensPerIter": float(knobs.tokens_per_step),
            },
        }
        self.stats.append(
            {name: value for name, value in stats.items() if name not in knobs.missing_stats}
        )


def _new_worker() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WORKER, "mpi4py.futures.server"]
    worker = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert worker.stdout is not None
    # Just after its start a process has no command line yet
    worker.stdout.readline()
    return worker
