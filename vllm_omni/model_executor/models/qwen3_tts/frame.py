"""One frame of Qwen3-TTS codes with a key/value cache.

The code predictor is a small Qwen3 decoder. A frame feeds it two positions,
the talker's hidden state and the embedding of code 0, and then one position
for each code that it has just sampled. Everything a frame touches lies in
buffers that were allocated before it (`FrameBuffers`), so a CUDA graph over
`Frame.run` replays for any streams and parameters in the same tensors.

Letters in shapes: B rows, n positions of this step, N = B n, E hidden size,
H query heads, K key/value heads, D head size, I MLP size, V codes of a
codebook, Q codes of a frame, A the talker's hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rowseed.kernels.sampling import Gather


class Linear:
    """`x @ weight.T (+ bias)` of a loaded layer, into `out` or a new tensor.

    On a CPU a second, oneDNN-packed copy of the weight is kept: the GEMMs of
    a frame are bound by reading weights, and the packed layout reads up to
    1.7 times faster. Packed products return a new tensor.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, packed: bool = False):
        self.weight, self.bias = weight, bias
        self.transposed = weight.t()
        # 32 is oneDNN's hint for the number of rows; other numbers work too.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 32) if packed else None

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        if self.packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        if self.bias is not None:
            return torch.addmm(self.bias, x, self.transposed, out=out)
        return torch.mm(x, self.transposed, out=out)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual + x @ weight.T`, into the residual or a new tensor."""
        if self.packed is not None:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.packed, None, "add")
        return torch.addmm(residual, x, self.transposed, out=residual)


@dataclass
class LayerWeights:
    input_norm: Tensor  # [E]
    qkv: Linear
    cos: Tensor  # float32 [Q, H + K, D]: the q/k norms, RoPE and the score's scale, folded
    sin: Tensor  # float32 [Q, H + K, 2, D / 2]
    o: Linear
    mlp_norm: Tensor  # [E]
    gate_up: Linear
    down: Linear


def _rope_tables(attention: Any, inv_freq: Tensor, positions: int) -> tuple[Tensor, Tensor]:
    """RoPE's cosines and sines times the weights of the q and k norms.

    `norm(x) * w` rotated is `x / |x|` times these; the root of D of the norm
    and the score's 1 / sqrt(D) of the queries are in them too.
    """
    H, K, D = attention.num_heads, attention.num_kv_heads, attention.head_dim
    weight = torch.cat(
        (
            (attention.q_norm.weight.float() * attention.scaling).expand(H, D),
            attention.k_norm.weight.float().expand(K, D),
        )
    ) * (D**0.5)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32, device=weight.device), inv_freq.float())
    cos = torch.cat((angles, angles), -1).cos()[:, None] * weight
    low, high = weight.view(H + K, 2, D // 2).unbind(1)
    sin = angles.sin()[:, None]
    return cos.contiguous(), torch.stack((-high * sin, low * sin), 2).contiguous()


class FrameWeights:
    """What a frame reads, folded once from a loaded `CodePredictorWrapper`.

    The embedding tables become one [Q - 1, V, A] tensor that the module's own
    parameters are then views of. With a projection (talker and predictor of
    different size) a projected copy [Q - 2, V, E] is kept beside it.
    """

    def __init__(self, predictor: Any, *, packed: bool):
        self.packed = packed
        self.embedding = _stacked(predictor.model.codec_embedding)
        self._fold(predictor)

    def refold(self, predictor: Any) -> None:
        """Fold again after new weights were loaded, in place: captured graphs read these tensors."""
        fresh = FrameWeights.__new__(FrameWeights)
        fresh.packed, fresh.embedding = self.packed, self.embedding
        fresh._fold(predictor)
        for mine, new in zip(self.tensors(), fresh.tensors(), strict=True):
            if mine.data_ptr() != new.data_ptr():
                mine.copy_(new)
        for linear, refolded in zip(self._linears(), fresh._linears(), strict=True):
            linear.packed = refolded.packed

    def _linears(self) -> Iterator[Linear]:
        for layer in self.layers:
            yield from (layer.qkv, layer.o, layer.gate_up, layer.down)
        yield from self.heads
        if self.projection is not None:
            yield self.projection

    def tensors(self) -> Iterator[Tensor]:
        """Everything that frames read."""
        for linear in self._linears():
            yield linear.weight
            if linear.bias is not None:
                yield linear.bias
        for layer in self.layers:
            yield from (layer.input_norm, layer.cos, layer.sin, layer.mlp_norm)
        yield from (self.norm, self.next_embedding)

    def _fold(self, predictor: Any) -> None:
        model, config = predictor.model, predictor.config
        weight = model.codec_embedding[0].weight
        packed = self.packed
        # float16 has not the range for the MLP: run it in float32, as vLLM-Omni does on a GPU.
        self.dtype = torch.float32 if weight.dtype == torch.float16 else weight.dtype
        self.device = weight.device
        self.groups = int(config.num_code_groups)
        self.eps = float(config.rms_norm_eps)

        def linear(layer: nn.Linear) -> Linear:
            bias = None if layer.bias is None else layer.bias.detach().to(self.dtype)
            return Linear(layer.weight.detach().to(self.dtype), bias, packed=packed)

        def norm(layer: Any) -> Tensor:
            return layer.weight.detach().to(self.dtype)

        self.layers = []
        for layer in model.layers:
            cos, sin = _rope_tables(layer.self_attn, model.rotary_emb.inv_freq, self.groups)
            self.layers.append(
                LayerWeights(
                    input_norm=norm(layer.input_layernorm),
                    qkv=linear(layer.self_attn.qkv_proj),
                    cos=cos,
                    sin=sin,
                    o=linear(layer.self_attn.o_proj),
                    mlp_norm=norm(layer.post_attention_layernorm),
                    gate_up=linear(layer.mlp.gate_up_proj),
                    down=linear(layer.mlp.down_proj),
                )
            )
        self.norm = norm(model.norm)
        self.heads = [linear(head) for head in predictor.lm_head]
        attention = model.layers[0].self_attn
        self.num_heads, self.num_kv_heads = attention.num_heads, attention.num_kv_heads
        self.head_dim = attention.head_dim
        self.mlp = model.layers[0].mlp.down_proj.in_features

        projection = predictor.small_to_mtp_projection
        self.projection = None if isinstance(projection, nn.Identity) else linear(projection)
        table = self.embedding.to(self.dtype)
        if self.projection is not None:
            table = nn.functional.linear(table[:-1], self.projection.weight, self.projection.bias)
        self.next_embedding = table


def _stacked(embeddings: Any) -> Tensor:
    """The tables as one [Q - 1, V, A] tensor, which the parameters become views of."""
    first = embeddings[0].weight
    stacked = first.new_empty((len(embeddings), *first.shape))
    for table, embedding in zip(stacked, embeddings, strict=True):
        table.copy_(embedding.weight.detach())
        embedding.weight.data = table
    return stacked


class FrameBuffers:
    """Every tensor that frames of up to `rows` rows write. Zeroed: rows that no
    frame has filled yet must hold finite numbers."""

    def __init__(self, weights: FrameWeights, rows: int):
        H, K, D, Q = weights.num_heads, weights.num_kv_heads, weights.head_dim, weights.groups
        E, A = weights.norm.shape[0], weights.embedding.shape[2]
        self.rows = rows

        def zeros(*shape: int, dtype: torch.dtype = weights.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=weights.device)

        def zeros32(*shape: int) -> Tensor:
            return zeros(*shape, dtype=torch.float32)

        N = 2 * rows
        self.talker = None if weights.projection is None else zeros(N, A)
        self.x = zeros(N, E)
        self.y = zeros(N, E)
        self.norm = zeros32(N, 1)
        self.qkv = zeros(N, (H + 2 * K) * D)
        self.qkv32 = self.qkv if weights.dtype == torch.float32 else zeros32(N, (H + 2 * K) * D)
        self.rotated = zeros32(N, H + K, D)
        self.head_norm = zeros32(N, H + K, 1)
        self.q = zeros32(N * H * D)
        self.keys = zeros32(len(weights.layers), rows, K, Q, D)
        self.values = torch.zeros_like(self.keys)
        self.scores = zeros32(N * H * Q)
        self.probabilities = torch.zeros_like(self.scores)
        self.attended = zeros32(N * H * D)
        self.attention = zeros(N, H * D)
        self.gate_up = zeros(N, 2 * weights.mlp)
        self.gated = zeros(N, weights.mlp)
        self.logits = zeros(rows, weights.heads[0].weight.shape[0])
        self.codes = zeros(rows, Q, dtype=torch.int64)
        self.status = zeros(rows, Q, dtype=torch.int32)  # the sampler's, of each code
        self.total = zeros32(rows, A)


Sampler = Callable[[int, Tensor, Tensor, Gather], None]


class Frame:
    """The cached transformer over `weights`, in `buffers`, in torch operators.

    `frame_kernels.FusedFrame` does on a GPU what stands between the matrix products in one kernel each.
    """

    def __init__(self, weights: FrameWeights, buffers: FrameBuffers):
        self.weights, self.buffers = weights, buffers
        E, D = weights.norm.shape[0], weights.head_dim
        self._inv_root = E**-0.5
        # Named, because vLLM loads a model with the model's dtype as torch's default.
        self._root_eps = torch.tensor(weights.eps**0.5, dtype=torch.float32, device=weights.device)
        self._root_head_eps = torch.tensor(
            (weights.eps * D) ** 0.5, dtype=torch.float32, device=weights.device
        )

    def run(self, code0: Tensor, embed: Tensor, hidden: Tensor, sample: Sampler) -> tuple[Tensor, Tensor]:
        """Predict codes 1 .. Q - 1 of B rows.

        Args:
            code0: int [B], the talker's code.
            embed: [B, A], its embedding.
            hidden: [B, A], the talker's last hidden state.
            sample: called once a code as `sample(codebook, logits [B, V], out int64 [B], gather)`;
                draws the codes and does what `Gather` says.

        Returns:
            int64 [B, Q] codes and float32 [B, A], the sum of the residual codes' embeddings: views
            of the buffers, valid until the next frame.
        """
        w, b = self.weights, self.buffers
        B, Q = code0.shape[0], w.groups
        codes, total, x = b.codes[:B], b.total[:B], b.x[:B]
        codes[:, 0].copy_(code0)
        total.zero_()
        self._enter(hidden, embed)
        for step in range(1, Q):
            first = step == 1
            logits = self._step(w.heads[step - 1], B, 0 if first else step, 2 if first else 1)
            last = step == Q - 1
            gather = Gather(
                w.embedding[step - 1],
                total,
                None if last else w.next_embedding[step - 1],
                None if last else x,
            )
            sample(step, logits, codes[:, step], gather)
        return codes, total

    def _enter(self, hidden: Tensor, embed: Tensor) -> None:
        """Positions 0 and 1, through the projection where there is one."""
        w, b = self.weights, self.buffers
        B = hidden.shape[0]
        inputs = b.x if b.talker is None else b.talker
        pair = inputs[: 2 * B].view(B, 2, -1)
        pair[:, 0].copy_(hidden)
        pair[:, 1].copy_(embed)
        if w.projection is not None:
            projected = w.projection(inputs[: 2 * B], b.x[: 2 * B])
            if projected.data_ptr() != b.x.data_ptr():
                b.x[: 2 * B].copy_(projected)

    def _step(self, head: Linear, B: int, position: int, n: int) -> Tensor:
        """Logits [B, V] after the n positions from `position` on, whose inputs are in x."""
        w, b = self.weights, self.buffers
        N = B * n
        x, y = b.x[:N], b.y[:N]
        for index, layer in enumerate(w.layers):
            self._rms_norm(x, layer.input_norm, y)
            qkv = layer.qkv(y, b.qkv[:N])
            x = layer.o.add_to(x, self._attend(layer, index, qkv, B, position, n))
            self._rms_norm(x, layer.mlp_norm, y)
            x = layer.down.add_to(x, self._gate(layer.gate_up(y, b.gate_up[:N])))
        last = x.view(B, n, -1)[:, -1]
        self._rms_norm(last, w.norm, b.y[:B])
        return head(b.y[:B], b.logits[:B])

    def _rms_norm(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """x / sqrt(mean(x^2) + eps), rounded, times the weight: Hugging Face's order of roundings."""
        norm = self.buffers.norm[: x.shape[0]]
        torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32, out=norm)
        norm.mul_(self._inv_root).hypot_(self._root_eps)
        torch.div(x, norm, out=out)
        out.mul_(weight)

    def _gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up: [N, I]."""
        gate, up = gate_up.chunk(2, -1)
        torch.ops.aten.silu_(gate)
        return torch.mul(gate, up, out=self.buffers.gated[: gate_up.shape[0]])

    def _attend(self, layer: LayerWeights, index: int, qkv: Tensor, B: int, position: int, n: int) -> Tensor:
        """Attention of the n new positions over all so far, in float32: [N, H D]."""
        w, b = self.weights, self.buffers
        H, K, D, Q = w.num_heads, w.num_kv_heads, w.head_dim, w.groups
        N, group, end = B * n, H // K, position + n
        qkv32 = qkv
        if qkv.dtype != torch.float32:
            qkv32 = b.qkv32[:N].copy_(qkv)
        qkv32 = qkv32.view(B, n, H + 2 * K, D)

        # q and k: x / |x|, rotated; the weights of the norms are in the tables.
        qk = qkv32[:, :, : H + K]
        norm = b.head_norm[:N].view(B, n, H + K, 1)
        torch.linalg.vector_norm(qk, dim=-1, keepdim=True, out=norm)
        norm.hypot_(self._root_head_eps)
        rotated = b.rotated[:N].view(B, n, H + K, D)
        torch.mul(qk, layer.cos[position:end], out=rotated)
        halves, rotated_halves = qk.view(B, n, H + K, 2, D // 2), rotated.view(B, n, H + K, 2, D // 2)
        sin = layer.sin[position:end]
        rotated_halves[..., 0, :].addcmul_(halves[..., 1, :], sin[:, :, 0])
        rotated_halves[..., 1, :].addcmul_(halves[..., 0, :], sin[:, :, 1])

        keys, values = b.keys[index, :B], b.values[index, :B]
        q = b.q[: N * H * D].view(B, K, n, group, D)
        torch.div(
            rotated[:, :, :H].view(B, n, K, group, D),
            norm[:, :, :H].view(B, n, K, group, 1),
            out=q.transpose(1, 2),
        )
        torch.div(rotated[:, :, H:], norm[:, :, H:], out=keys[:, :, position:end].transpose(1, 2))
        values[:, :, position:end].transpose(1, 2).copy_(qkv32[:, :, H + K :])

        scores = b.scores[: N * H * end].view(B * K, n * group, end)
        past_keys = keys.view(B * K, Q, D)[:, :end]
        torch.bmm(q.view(B * K, n * group, D), past_keys.transpose(1, 2), out=scores)
        if n == 2:  # position 0 does not see position 1
            scores.view(B * K, n, group, end)[:, 0, :, 1].fill_(-torch.inf)
        probabilities = b.probabilities[: scores.numel()].view_as(scores)
        torch.softmax(scores, -1, out=probabilities)
        attended = b.attended[: N * H * D].view(B * K, n * group, D)
        torch.bmm(probabilities, values.view(B * K, Q, D)[:, :end], out=attended)
        if n == 1 and w.dtype == torch.float32:
            return attended.view(N, H * D)
        attention = b.attention[:N]
        attention.view(B, n, K, group, D).copy_(attended.view(B, K, n, group, D).transpose(1, 2))
        return attention
