"""CUDA graphs of the frame, for engines that capture none themselves (`enforce_eager`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rowseed.kernels.sampling import Gather, sample

from .frame import Frame


def capture_cuda(run: Callable[[], None]) -> Callable[[], None]:
    """A graph of `run`'s work, as the call that replays it. `run` has been called once by then."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles kernels and sizes workspaces, outside the capture
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        run()
    return graph.replay


class FrameGraphs:
    """`Frame.run` and its draws as one graph a batch bucket; buckets are powers of two.

    A frame's inputs, streams and parameters are copied into tensors of fixed addresses; the rows that
    fill up a bucket lie past the streams' number of rows, so they draw nothing.
    """

    def __init__(
        self, frame: Frame, capture: Callable[[Callable[[], None]], Callable[[], None]] = capture_cuda
    ):
        weights, rows = frame.weights, frame.buffers.rows
        device, hidden = weights.device, weights.embedding.shape[2]
        self._frame, self._capture = frame, capture
        self._replays: dict[int, Callable[[], None]] = {}
        self._code0 = torch.zeros(rows, dtype=torch.int64, device=device)
        self._embed = torch.zeros(rows, hidden, dtype=weights.dtype, device=device)
        self._hidden = torch.zeros_like(self._embed)
        self._streams = torch.zeros(rows + 1, 3, dtype=torch.int64, device=device)
        self._temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self._top_k = torch.zeros(rows, dtype=torch.int32, device=device)
        self._top_p = torch.ones(rows, dtype=torch.float32, device=device)

    def run(
        self,
        code0: Tensor,
        embed: Tensor,
        hidden: Tensor,
        streams: Tensor,
        temperature: float | Tensor,
        top_k: int | Tensor | None,
        top_p: float | Tensor,
    ) -> tuple[Tensor, Tensor]:
        """As `Frame.run`, with the arguments of `sample`."""
        B = code0.shape[0]
        bucket = min(1 << (B - 1).bit_length(), self._frame.buffers.rows)
        self._code0[:B].copy_(code0)
        self._embed[:B].copy_(embed)
        self._hidden[:B].copy_(hidden)
        self._streams[: B + 1].copy_(streams[: B + 1])
        # A graph for B rows must not draw for rows that only the caller's longer streams have.
        self._streams[0, 2].clamp_(max=B)
        for mine, value in (
            (self._temperature, temperature),
            (self._top_k, 0 if top_k is None else top_k),
            (self._top_p, top_p),
        ):
            if isinstance(value, Tensor):
                mine[:B].copy_(value)
            else:
                mine[:B].fill_(value)
        if bucket not in self._replays:
            self._replays[bucket] = self._capture(lambda: self._run(bucket))
        self._replays[bucket]()
        return self._frame.buffers.codes[:B], self._frame.buffers.total[:B]

    def _run(self, rows: int) -> None:
        def draw(codebook: int, logits: Tensor, out: Tensor, gather: Gather) -> None:
            sample(
                logits,
                self._streams,
                temperature=self._temperature[:rows],
                top_k=self._top_k[:rows],
                top_p=self._top_p[:rows],
                codebook=codebook,
                out=out,
                status=self._frame.buffers.status[:rows, codebook],
                gather=gather,
            )

        self._frame.run(self._code0[:rows], self._embed[:rows], self._hidden[:rows], draw)
