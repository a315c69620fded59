"""The heartbeats by which the nodes of one engine notice that a node is lost.

In vLLM a group that has lost a node waits without end. So each node writes heartbeats to the store
that torch keeps on node 0 while the group lives, and reads those of the nodes that it watches.
"""

import logging
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore
from vllm.config import ParallelConfig

from lmi.errors import cause_line

BEAT_S = 0.5
# A node that is silent for longer is lost.
SILENT_S = 10.0
# The wait for its first heartbeat. The nodes of a group do not end their start at the same moment.
FIRST_BEAT_S = 60.0

log = logging.getLogger("lmi.vllm")


@dataclass(slots=True)
class _WatchedNode:
    """What was heard of a node."""

    number: int
    num_beats: int
    last_change_s: float

    def note(self, num_beats: int) -> None:
        """Note how many heartbeats it has made. Raises TimeoutError if it is silent for long."""
        now_s = time.monotonic()
        if num_beats != self.num_beats:
            self.num_beats = num_beats
            self.last_change_s = now_s
            return

        silence_s = now_s - self.last_change_s
        max_silence_s = SILENT_S if num_beats else FIRST_BEAT_S
        if silence_s > max_silence_s:
            raise TimeoutError(f"node {self.number} was silent for {silence_s:.0f} s")


class NodeHeartbeat:
    """The heartbeats of this node, and its watch over others: all watch node 0, which watches all.

    `is_whole` is false once a watched node is lost.
    """

    def __init__(self, nodes: ParallelConfig) -> None:
        self.is_whole = True
        self._nodes = nodes
        numbers = range(1, nodes.nnodes) if nodes.node_rank == 0 else [0]
        self._watched = [_WatchedNode(number, 0, time.monotonic()) for number in numbers]
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the heartbeat of this node."""
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            address = self._nodes.master_addr
            port = self._nodes.master_port
            store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=SILENT_S))

            while not self._is_closed.wait(BEAT_S):
                store.add(f"lmi/beat/{self._nodes.node_rank}", 1)
                for node in self._watched:
                    node.note(store.add(f"lmi/beat/{node.number}", 0))
        except Exception as error:
            if not self._is_closed.is_set():
                log.critical("node 0 is lost: its store does not answer: %s", cause_line(error))
                self.is_whole = False
