"""A code predictor as a runner calls it: every input in tensors of fixed addresses, the batch padded."""

import torch
from predictors import TINY, frame_inputs, make_predictor, randomise

from rowseed.kernels.streams import RowParameters, RowStreams

ROWS = 8


class Server:
    """A predictor with the static buffers a runner has: its batch of ROWS rows is padded."""

    def __init__(self, talker_hidden: int, device: str = "cpu", dtype: torch.dtype = torch.float32):
        torch.manual_seed(0)
        self.predictor = make_predictor(talker_hidden=talker_hidden, max_num_seqs=ROWS, dtype=dtype, **TINY)
        randomise(self.predictor)
        self.predictor.to(device)
        self.inputs = [tensor.to(device) for tensor in frame_inputs(ROWS, talker_hidden, dtype)]
        self.streams = RowStreams(ROWS, device, global_seed=3)
        self.parameters = RowParameters(ROWS, device)

    def pack(self, step: int) -> None:
        """Another frame: other rows, seeds, offsets, parameters and hidden states in the same tensors."""
        rows = 1 + (3 * step + 2) % ROWS
        seeds = [None if (row + step) % 3 == 0 else 100 * step + row for row in range(rows)]
        self.streams.pack(seeds, [step + row for row in range(rows)])
        self.parameters.pack(
            [0.5 + 0.1 * row * step for row in range(rows)],
            [(row * step) % 20 for row in range(rows)],
            [1.0 - 0.1 * ((row + step) % 4) for row in range(rows)],
        )
        for mine, new in zip(
            self.inputs, frame_inputs(ROWS, self.inputs[1].shape[-1], seed=step), strict=True
        ):
            mine.copy_(new)

    def frame(self, **changed):
        arguments = {
            "streams": self.streams.tensor,
            "temperature": self.parameters.temperature,
            "top_k": self.parameters.top_k,
            "top_p": self.parameters.top_p,
        }
        return self.predictor(*self.inputs, **arguments | changed)
