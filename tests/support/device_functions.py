"""The device functions of scheme 1 as kernels of their own, elementwise over int64 or float32 tensors."""

import torch
import triton
import triton.language as tl

from rowseed.kernels import device


@triton.jit
def _gumbel_kernel(words_ptr, out_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words_ptr + i, mask=i < N, other=0).to(tl.uint32)
    tl.store(out_ptr + i, device.gumbel(word), mask=i < N)


@triton.jit
def _mass_kernel(t_ptr, out_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t = tl.load(t_ptr + i, mask=i < N, other=0.0)
    tl.store(out_ptr + i, device.mass(t).to(tl.int64), mask=i < N)


@triton.jit
def _words_kernel(out_ptr, seed, offset, domain, BLOCK: tl.constexpr):
    blocks = tl.arange(0, BLOCK // 4).to(tl.uint32)
    drawn = device.words(blocks, tl.load(seed), tl.load(offset), domain.to(tl.uint32))
    tl.store(out_ptr + tl.arange(0, BLOCK), drawn.to(tl.int64))


def gumbel(words):
    out = torch.empty_like(words, dtype=torch.float32)
    block = 65536 if words.device.type == "cpu" else 1024
    grid = (triton.cdiv(len(words), block),)
    _gumbel_kernel[grid](words, out, len(words), BLOCK=block, enable_fp_fusion=False)
    return out


def mass(t):
    out = torch.empty_like(t, dtype=torch.int64)
    _mass_kernel[(triton.cdiv(len(t), 1024),)](t, out, len(t), BLOCK=1024, enable_fp_fusion=False)
    return out


def words(seed, offset, domain):
    """seed, offset: int64 [1]. Returns the words of tokens 0..63."""
    out = torch.empty(64, dtype=torch.int64, device=seed.device)
    _words_kernel[(1,)](out, seed, offset, domain, BLOCK=64, enable_fp_fusion=False)
    return out
