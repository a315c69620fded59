"""Heartbeats by which the nodes of one engine watch each other.

In vLLM a group that has lost a node waits without end. So each node writes a heartbeat to the store that torch keeps on
node 0 while the group lives, and reads the heartbeats that it watches. This module knows nothing of engines.
"""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta

from torch.distributed import TCPStore

from lmi.errors import cause_line

BEAT_S = 0.5
SILENT_S = 10.0  # a node that is silent for longer is lost

log = logging.getLogger("lmi.vllm")


class NodeHeartbeat:
    """`address` and `port` are those of node 0's store. `is_whole` is false once a watched node is lost."""

    def __init__(self, address: str, port: int, rank: int, num_nodes: int) -> None:
        self.is_whole = True
        self._address, self._port, self._rank = address, port, rank
        # Every node watches node 0, which watches every node.
        watched = range(1, num_nodes) if rank == 0 else [0]
        self._heard = {node: (0, time.monotonic()) for node in watched}
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            store = TCPStore(self._address, self._port, is_master=False, timeout=timedelta(seconds=SILENT_S))
            while not self._is_closed.wait(BEAT_S):
                store.add(f"lmi/beat/{self._rank}", 1)
                for node in self._heard:
                    self._hear(node, store.add(f"lmi/beat/{node}", 0))
        except Exception as error:
            if not self._is_closed.is_set():
                log.critical("node 0 is lost: its store does not answer: %s", cause_line(error))
                self.is_whole = False

    def _hear(self, node: int, num_beats: int) -> None:
        last, heard_s = self._heard[node]
        now = time.monotonic()
        if num_beats != last:
            self._heard[node] = num_beats, now
        elif now - heard_s > SILENT_S:
            raise TimeoutError(f"node {node} was silent for {now - heard_s:.0f} s")
