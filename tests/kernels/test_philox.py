"""Philox against its authors' known answers and an independent numpy implementation."""

import device_functions
import numpy as np
import oracle
import pytest
import torch
from backends import on_device

from rowseed.kernels import cpu
from rowseed.kernels.philox import philox4x32

ONES = 0xFFFFFFFF
# https://github.com/DEShawResearch/random123/blob/main/tests/kat_vectors, "philox4x32 10"
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def tensors(words):
    return tuple(torch.tensor([w], dtype=torch.int64) for w in words)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_known_answers(counter, key, expected):
    assert tuple(int(w) for w in philox4x32(tensors(counter), tensors(key))) == expected
    assert tuple(int(w) for w in oracle.philox(counter, key)) == expected
    offset, seed = (np.uint64(low | high << 32) for low, high in (counter[:2], key))
    assert cpu._philox(offset, np.uint64(counter[2]), np.uint64(counter[3]), seed) == expected


def test_random_blocks_equal_numpy():
    rng = np.random.default_rng(3)
    counter = rng.integers(0, 2**32, (4, 1000), dtype=np.uint64)
    key = rng.integers(0, 2**32, 2, dtype=np.uint64)
    ours = philox4x32(tuple(torch.from_numpy(c.astype(np.int64)) for c in counter), tensors(map(int, key)))
    for word, expected in zip(ours, oracle.philox(counter, key), strict=True):
        assert np.array_equal(word.numpy().astype(np.uint64), expected)


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("offset", [0, 2**32, -1])
def test_device_words_equal_numpy(seed, offset):
    drawn = on_device(device_functions.words)(torch.tensor([seed]), torch.tensor([offset]), 1 << 24 | 9)
    assert np.array_equal(drawn.numpy().astype(np.uint32), oracle.words(seed, offset, 9, 0, 64))
