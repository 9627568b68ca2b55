"""The frame on a GPU: one Triton kernel for what stands between two matrix products.

A step of a layer is then eight launches: norm, qkv, attention, o, norm, gate and up, their product,
down. Each kernel does what the method of `frame.Frame` that it replaces does.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .frame import Frame, FrameBuffers, FrameWeights, LayerWeights


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [N, E]
    x_stride,
    weight_ptr,  # [E]
    out_ptr,  # [N, E]
    eps,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < E
    stored = tl.load(x_ptr + row * x_stride + column, inside, 0.0)
    x = stored.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / E + eps)
    weight = tl.load(weight_ptr + column, inside, 0.0)
    # Hugging Face's order of roundings: the normed value, then its product with the weight.
    y = x.to(stored.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + row * E + column, y.to(stored.dtype), inside)


@triton.jit
def _rotated_head(qkv_ptr, cos_ptr, sin_ptr, head, eps, D: tl.constexpr):
    """Both halves of a q or k head, normed and rotated."""
    half = tl.arange(0, D // 2)
    low = tl.load(qkv_ptr + head * D + half).to(tl.float32)
    high = tl.load(qkv_ptr + head * D + D // 2 + half).to(tl.float32)
    scale = tl.rsqrt(tl.sum(low * low, 0) + tl.sum(high * high, 0) + D * eps)
    cos_low, cos_high = tl.load(cos_ptr + head * D + half), tl.load(cos_ptr + head * D + D // 2 + half)
    sin_low, sin_high = tl.load(sin_ptr + head * D + half), tl.load(sin_ptr + head * D + D // 2 + half)
    return (low * cos_low + high * sin_low) * scale, (high * cos_high + low * sin_high) * scale


@triton.jit(do_not_specialize=["position"])
def _attention_kernel(
    qkv_ptr,  # [B, N_NEW, H + 2 K, D]
    cos_ptr,  # float32 [Q, H + K, D]
    sin_ptr,  # float32 [Q, H + K, D]
    keys_ptr,  # float32 [B, K, Q, D]
    values_ptr,  # float32 [B, K, Q, D]
    out_ptr,  # [B, N_NEW, H, D]
    position,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    Q: tl.constexpr,
    N_NEW: tl.constexpr,
    POSITIONS: tl.constexpr,  # Q rounded up to a power of two
):
    """A program a row and key/value head: caches the new positions and attends from them."""
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    GROUP: tl.constexpr = H // K
    half, at = tl.arange(0, D // 2), tl.arange(0, POSITIONS)
    cache = (row * K + kv_head) * Q * D
    place = cache + at[:, None] * D + half[None, :]
    seen = (at < position)[:, None]
    keys_low = tl.load(keys_ptr + place, seen, 0.0)
    keys_high = tl.load(keys_ptr + place + D // 2, seen, 0.0)
    values_low = tl.load(values_ptr + place, seen, 0.0)
    values_high = tl.load(values_ptr + place + D // 2, seen, 0.0)
    for new in tl.static_range(N_NEW):
        now = position + new
        qkv = qkv_ptr + (row * N_NEW + new) * (H + 2 * K) * D
        cos, sin = cos_ptr + now * (H + K) * D, sin_ptr + now * (H + K) * D
        key_low, key_high = _rotated_head(qkv, cos, sin, H + kv_head, eps, D)
        value = qkv + (H + K + kv_head) * D + half
        value_low = tl.load(value).to(tl.float32)
        value_high = tl.load(value + D // 2).to(tl.float32)
        mine = cache + now * D + half
        tl.store(keys_ptr + mine, key_low)
        tl.store(keys_ptr + mine + D // 2, key_high)
        tl.store(values_ptr + mine, value_low)
        tl.store(values_ptr + mine + D // 2, value_high)
        # The new position comes from registers: what was just stored is not read back.
        is_now = (at == now)[:, None]
        keys_low = tl.where(is_now, key_low[None, :], keys_low)
        keys_high = tl.where(is_now, key_high[None, :], keys_high)
        values_low = tl.where(is_now, value_low[None, :], values_low)
        values_high = tl.where(is_now, value_high[None, :], values_high)
        for member in tl.static_range(GROUP):
            head = kv_head * GROUP + member
            q_low, q_high = _rotated_head(qkv, cos, sin, head, eps, D)
            scores = tl.sum(keys_low * q_low[None, :] + keys_high * q_high[None, :], 1)
            scores = tl.where(at <= now, scores, float("-inf"))
            weights = tl.exp(scores - tl.max(scores, 0))
            weights = weights / tl.sum(weights, 0)
            out = out_ptr + ((row * N_NEW + new) * H + head) * D + half
            tl.store(out, tl.sum(weights[:, None] * values_low, 0).to(out_ptr.dtype.element_ty))
            tl.store(out + D // 2, tl.sum(weights[:, None] * values_high, 0).to(out_ptr.dtype.element_ty))


@triton.jit
def _gate_kernel(
    gate_up_ptr,  # [N, 2 MLP]
    out_ptr,  # [N, MLP]
    MLP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < MLP
    stored = tl.load(gate_up_ptr + row * 2 * MLP + column, inside, 0.0)
    gate = stored.to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * MLP + MLP + column, inside, 0.0).to(tl.float32)
    gate = (gate / (1 + tl.exp(-gate))).to(stored.dtype).to(tl.float32)
    tl.store(out_ptr + row * MLP + column, (gate * up).to(stored.dtype), inside)


def launch(
    kernel: triton.JITFunction, grid: tuple[int, ...], *arguments: object, **constants: object
) -> None:
    """Every launch of a frame but the sampler's, so that a test can see them all."""
    kernel[grid](*arguments, **constants)


class FusedFrame(Frame):
    """Head sizes are powers of two (`supports`)."""

    @staticmethod
    def supports(weights: FrameWeights) -> bool:
        return weights.head_dim & (weights.head_dim - 1) == 0

    def __init__(self, weights: FrameWeights, buffers: FrameBuffers):
        super().__init__(weights, buffers)
        self._size = weights.norm.shape[0]
        self._block = triton.next_power_of_2(self._size)
        self._positions = triton.next_power_of_2(weights.groups)

    def _rms_norm(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        launch(
            _rms_norm_kernel,
            (x.shape[0],),
            x,
            x.stride(0),
            weight,
            out,
            self.weights.eps,
            E=self._size,
            BLOCK=self._block,
        )

    def _attend(self, layer: LayerWeights, index: int, qkv: Tensor, B: int, position: int, n: int) -> Tensor:
        w, b = self.weights, self.buffers
        out = b.attention[: B * n]
        launch(
            _attention_kernel,
            (B, w.num_kv_heads),
            qkv,
            layer.cos,
            layer.sin,
            b.keys[index],
            b.values[index],
            out,
            position,
            w.eps,
            H=w.num_heads,
            K=w.num_kv_heads,
            D=w.head_dim,
            Q=w.groups,
            N_NEW=n,
            POSITIONS=self._positions,
        )
        return out

    def _gate(self, gate_up: Tensor) -> Tensor:
        rows, size = gate_up.shape[0], self.weights.mlp
        out = self.buffers.gated[:rows]
        block = min(1024, triton.next_power_of_2(size))
        launch(_gate_kernel, (rows, triton.cdiv(size, block)), gate_up, out, MLP=size, BLOCK=block)
        return out
