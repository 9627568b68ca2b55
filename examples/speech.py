"""A request and what it gave."""

from typing import NamedTuple

import numpy as np


class Request(NamedTuple):
    """One line of requests.jsonl. `seed` is an integer, or None for speech that differs each time."""

    text: str
    language: str = "English"
    seed: int | None = None
    voice: str = "vivian"


class Speech(NamedTuple):
    codes: np.ndarray  # int64 [frames, 16]
    waveform: np.ndarray  # float32 [samples]
    sample_rate: int
    seconds: float  # from submission to the last sample, by the wall clock
