"""The codes of one seed alone and in a batch, and their difference, as one picture."""

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw_codes(path: Path, alone: np.ndarray, batch: np.ndarray, title: str) -> None:
    """Write a PNG. `alone`, `batch`: int64 [frames, codebooks]."""
    frames = max(len(alone), len(batch))
    one, other = (pad(codes, frames) for codes in (alone, batch))
    difference = np.ma.filled(one != other, True)
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), sharey=True, constrained_layout=True)
    for axis, codes, name in zip(axes, (one, other), ("alone", "in a batch of four"), strict=False):
        image = axis.imshow(codes.T, aspect="auto", origin="lower", cmap="viridis", interpolation="nearest")
        axis.set_title(name)
    figure.colorbar(image, ax=axes[:2], label="code", pad=0.01)
    axes[2].imshow(difference.T, aspect="auto", origin="lower", cmap="Reds", vmin=0, vmax=1)
    axes[2].set_title(f"difference: {int(difference.sum())} of {difference.size} codes")
    for axis in axes:
        axis.set_xlabel("frame (12.5 a second)")
    axes[0].set_ylabel("codebook")
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def pad(codes: np.ndarray, frames: int) -> np.ma.MaskedArray:
    padded = np.ma.masked_all((frames, codes.shape[1]), dtype=codes.dtype)
    padded[: len(codes)] = codes
    return padded
