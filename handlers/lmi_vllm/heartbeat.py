"""The heartbeats by which the nodes of one engine notice that one of them is lost."""

import logging
import threading
import time
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


class NodeHeartbeat:
    """Heartbeats by which the nodes of one engine watch each other. `is_whole` is false once a
    watched node is lost.

    In vLLM a group that has lost a node waits without end. So each node writes a heartbeat to the
    store that torch keeps on node 0 while the group lives, and reads the heartbeats that it
    watches.
    """

    def __init__(self, nodes: ParallelConfig) -> None:
        self.is_whole = True
        self._nodes = nodes
        # Every node watches node 0, which watches every node.
        watched = range(1, nodes.nnodes) if nodes.node_rank == 0 else [0]
        self._heard = {node: (0, time.monotonic()) for node in watched}
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
                for node, (last, heard_s) in self._heard.items():
                    num_beats = store.add(f"lmi/beat/{node}", 0)
                    now = time.monotonic()
                    max_silence_s = SILENT_S if num_beats else FIRST_BEAT_S
                    if num_beats != last:
                        self._heard[node] = (num_beats, now)
                    elif now - heard_s > max_silence_s:
                        raise TimeoutError(f"node {node} was silent for {now - heard_s:.0f} s")
        except Exception as error:
            if not self._is_closed.is_set():
                log.critical("node 0 is lost: its store does not answer: %s", cause_line(error))
                self.is_whole = False
