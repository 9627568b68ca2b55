"""What `make run` claims, as functions of what came out. Each gives one line of the closing table."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from speech import Speech

QUIETEST_RMS = 0.01  # -40 dB of full scale
CLIPPED = 0.999
MOST_CLIPPED = 1e-3  # share of samples


class Check(NamedTuple):
    claim: str
    passed: bool
    detail: str


def loud(speeches: Sequence[Speech]) -> Check:
    """Every waveform is as loud as speech: comparisons of silence, or of full scale, would show nothing."""
    quietest = min((rms(speech.waveform) for speech in speeches), default=0.0)
    clipped = max((clipped_share(speech.waveform) for speech in speeches), default=1.0)
    return Check(
        "every WAV is speech-loud: not silent, not clipped",
        quietest >= QUIETEST_RMS and clipped <= MOST_CLIPPED,
        f"least RMS {quietest:.3f}, at most {clipped:.2%} of samples at full scale",
    )


def same(claim: str, speeches: Sequence[Speech]) -> Check:
    """All have equal codes and equal samples."""
    first, *others = speeches
    different = [differing_codes(first, other) for other in others]
    audio = all(np.array_equal(first.waveform, other.waveform) for other in others)
    return Check(
        claim,
        bool(others) and first.codes.size > 0 and not any(different) and audio,
        f"{max(different, default=0)} of {first.codes.size} codes, samples {'equal' if audio else 'differ'}",
    )


def different(claim: str, one: Speech, other: Speech) -> Check:
    """Codes of codebook 0 and of the residual codebooks differ, and so do the samples."""
    residual = differing_codes(one, other, first_codebook=1)
    return Check(
        claim,
        residual > 0 and not np.array_equal(one.waveform, other.waveform),
        f"{differing_codes(one, other)} codes differ, {residual} of them residual",
    )


def through_rowseed(processes: dict[str, dict[str, int]], seeded_frames: int, unseeded_frames: int) -> Check:
    """Each frame of each request is one row that some process counted. Rows: by pid, `seeded`, `unseeded`."""
    seeded = sum(rows["seeded"] for rows in processes.values())
    unseeded = sum(rows["unseeded"] for rows in processes.values())
    return Check(
        "the residual codes of all frames were sampled by rowseed",
        seeded >= seeded_frames > 0 and unseeded >= unseeded_frames > 0,
        f"{seeded} seeded rows for {seeded_frames} frames, {unseeded} unseeded for {unseeded_frames}",
    )


def differing_codes(one: Speech, other: Speech, first_codebook: int = 0) -> int:
    """Codes [frames, 16] that differ; a frame that only one of the two has differs in all its codes."""
    frames = min(len(one.codes), len(other.codes))
    codebooks = slice(first_codebook, None)
    extra = abs(len(one.codes) - len(other.codes)) * one.codes[:1, codebooks].size
    return int(np.sum(one.codes[:frames, codebooks] != other.codes[:frames, codebooks])) + extra


def rms(waveform: np.ndarray) -> float:
    """Root mean square of float samples; 1 is full scale."""
    return float(np.sqrt(np.mean(np.square(waveform, dtype=np.float64)))) if waveform.size else 0.0


def clipped_share(waveform: np.ndarray) -> float:
    """Share of the samples that are at full scale."""
    return float(np.mean(np.abs(waveform) >= CLIPPED)) if waveform.size else 0.0
