"""Memory of captured graphs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class GraphPool:
    """Memory that graphs share, of which no two may run at the same time.

    They are captured on one stream, because only there a graph finds what the one before it has freed.
    """

    def __init__(self, device: torch.device) -> None:
        self._handle = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def capture(self) -> Iterator[torch.cuda.CUDAGraph]:
        """What is launched inside becomes the graph's, and does nothing yet. Waits for the device first.

        Unlike `torch.cuda.graph` this leaves the allocator's caches alone: it happens in pauses of serving, and to take
        memory again later means to wait until the GPU has nothing to do.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._handle)
            try:
                yield graph
            finally:
                graph.capture_end()
