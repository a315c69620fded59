"""The thread that runs user code, and the queue of messages in front of it."""

from __future__ import annotations

import queue
import threading
import time

from lmi.shared.state import EngineRecord
from lmi.user_code.job import Job
from lmi.user_code.messages import Work


class CodeThread:
    """Works on one message after the other, and writes its progress into the record.

    The supervisor reads the record to find code that never returns (`lmi/supervisor/restarts.py`).
    """

    def __init__(self, record: EngineRecord) -> None:
        self._record = record
        self._queue: queue.SimpleQueue[tuple[Job, Work]] = queue.SimpleQueue()
        self._is_busy = False
        record.max_num_sequences = 1
        record.step_s = time.monotonic()
        threading.Thread(target=self._run, name="code", daemon=True).start()

    @property
    def is_idle(self) -> bool:
        return not self._is_busy and self._queue.empty()

    def put(self, job: Job, message: Work) -> None:
        self._queue.put((job, message))

    def beat(self) -> None:
        """Write into the record that the process is alive, and how many messages wait."""
        self._record.beat_s = time.monotonic()
        self._record.num_waiting = self._queue.qsize()

    def _run(self) -> None:
        while True:
            job, message = self._queue.get()
            self._is_busy = True
            self._record.step_s = time.monotonic()
            self._record.num_running = 1
            job.work_on(message)
            self._record.step += 1
            self._record.num_running = 0
            self._is_busy = False
