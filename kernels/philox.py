"""Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11) in torch."""

import torch

SCHEME = 1
"""Number of the recipe that turns (seed, offset, codebook, logits) into a code."""

TAG_SEEDED, TAG_GLOBAL, TAG_GLOBAL_SEED, TAG_ITEM_SEED = 0, 1, 2, 3
"""What a counter block is for: rows with a seed, rows without, deriving a global seed or an item's."""

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

_MASK = 0xFFFFFFFF


def philox4x32(
    counter: tuple[torch.Tensor, ...],  # 4 x int64, each holding a uint32
    key: tuple[torch.Tensor, ...],  # 2 x int64, each holding a uint32
) -> tuple[torch.Tensor, ...]:
    """Ten rounds of Philox4x32 on broadcastable int64 tensors that hold uint32 values.

    Returns four int64 tensors, each in [0, 2**32).
    """
    c0, c1, c2, c3 = (c & _MASK for c in counter)
    k0, k1 = (k & _MASK for k in key)
    for _ in range(ROUNDS):
        # The 64-bit products wrap to negative int64s; their halves are still right.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, ((p0 >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = p1 & _MASK, p0 & _MASK
        k0, k1 = (k0 + WEYL[0]) & _MASK, (k1 + WEYL[1]) & _MASK
    return c0, c1, c2, c3
