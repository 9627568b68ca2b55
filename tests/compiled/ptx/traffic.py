"""What memory accesses cost: sectors of global memory, passes over the banks of shared memory."""

import numpy as np

BANKS, WORD, SECTOR = 32, 4, 32


def sectors(warps, addresses, size: int, warps_a_block: int, blocks: int):
    """int64 [blocks]: different 32-byte sectors that each warp asks for. warps: int64 [N], of the batch."""
    first, last = addresses // SECTOR, (addresses + size - 1) // SECTOR
    keys = np.concatenate(
        [warps << 45 | first, warps << 45 | last] if (first != last).any() else [warps << 45 | first]
    )
    return np.bincount((np.unique(keys) >> 45) // warps_a_block, minlength=blocks)


def passes(threads, addresses, size: int, block_threads: int, blocks: int):
    """int64 [blocks], twice: passes over the banks, and how many there were if no two words met in one.

    A pass serves 32 lanes of up to 4 bytes, 16 of 8 or 8 of 16; one word for several lanes is one access.
    """
    together = max(BANKS * WORD // max(size, WORD), 1)
    groups = threads // together
    words = (addresses // WORD)[:, None] + np.arange(max(size // WORD, 1))
    keys = np.unique((groups[:, None] << 24) | words)
    group, bank = keys >> 24, keys % BANKS
    of_group = np.bincount(group * BANKS + bank).astype(np.int64)
    of_group = np.pad(of_group, (0, -len(of_group) % BANKS)).reshape(-1, BANKS).max(1)
    block = np.arange(len(of_group)) * together // block_threads
    taken = np.bincount(block, of_group, minlength=blocks).astype(np.int64)
    return taken, np.bincount(block, of_group > 0, minlength=blocks).astype(np.int64)
