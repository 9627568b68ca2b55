"""vLLM-Omni's Qwen3-TTS code predictor, with a key/value cache and row streams.

Same constructor, parameters and weight loading; the forward pass is
`frame.Frame` and the draw is `rowseed.kernels.sampling.sample`: one launch a
code, which also prepares the next position's input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from vllm_omni.model_executor.models.qwen3_tts.qwen3_tts_code_predictor_vllm import (
    Qwen3TTSTalkerCodePredictorForConditionalGenerationVLLM,
)

from rowseed.kernels.sampling import Gather, sample
from rowseed.kernels.streams import RowStreams

from .frame import Frame, FrameBuffers, FrameWeights
from .frame_graphs import FrameGraphs


class SeededCodePredictor(Qwen3TTSTalkerCodePredictorForConditionalGenerationVLLM):
    """Residual codes of every row, each row from its own stream.

    Attributes:
        frame_sum: float32 [B, talker hidden], after a forward: the sum of the embeddings of each row's
            residual codes; zero for inactive rows. Valid until the next forward.
    """

    frame_sum: Tensor

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._frame: Frame | None = None
        self._graphs: FrameGraphs | None = None
        # Buffers that were outgrown: a graph captured over them may still be replayed.
        self._outgrown: list[FrameBuffers] = []
        self._unseeded: RowStreams | None = None
        self._max_rows = _max_rows(self._vllm_config)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = super().load_weights(weights)
        if self._frame is not None:
            with _ordinary_tensors():
                self._frame.weights.refold(self)
        self.prepare()
        return loaded

    def _apply(self, fn, recurse=True):
        self._frame = self._graphs = None  # .to(), .cuda(), .bfloat16() give the parameters new storage
        return super()._apply(fn, recurse)

    def prepare(self, rows: int = 0) -> Frame:
        """Fold the weights and allocate buffers for at least `rows` rows, unless that is done.

        Loading weights and the first forward do this. It cannot be done while a CUDA graph is being
        captured.

        Raises:
            RuntimeError: during a capture, if there is anything to do.
        """
        frame = self._frame
        if frame is not None and frame.buffers.rows >= rows:
            return frame
        if _capturing():
            raise RuntimeError(
                f"the code predictor is not ready for a CUDA graph of {rows} rows: "
                f"call prepare({rows}) or run one frame of that size before the capture"
            )
        rows = max(rows, self._max_rows)
        with _ordinary_tensors():
            if frame is None:
                weights = FrameWeights(self, packed=_packs(self.model))
            else:
                weights = frame.weights
                self._outgrown.append(frame.buffers)
                rows = 1 << (rows - 1).bit_length()
            self._frame = _frame(weights, FrameBuffers(weights, rows))
            if weights.device.type == "cuda" and not _has_full_graphs(self._vllm_config):
                self._graphs = FrameGraphs(self._frame)
        return self._frame

    @property
    def status(self) -> Tensor:
        """int32 [rows, Q], after a forward: the sampler's status word of each residual code. Valid until the
        next forward, for the rows that were sampled."""
        return self.prepare().buffers.status

    @property
    def stacked_codec_embedding(self) -> Tensor:
        """[Q - 1, V, talker hidden]: the residual codebooks' embedding tables, not a copy of them."""
        return self.prepare().weights.embedding

    @torch.inference_mode()
    def forward(
        self,
        layer0_code: Tensor,
        layer0_embed: Tensor,
        last_talker_hidden: Tensor,
        do_sample: bool = True,
        temperature: float | Tensor = 0.9,
        top_k: int | Tensor | None = 50,
        top_p: float | Tensor = 1.0,
        generator: torch.Generator | None = None,
        generators: Sequence[torch.Generator | None] | None = None,
        sample_uniforms: Tensor | None = None,
        streams: Tensor | None = None,
    ) -> Tensor:
        """Predict codes 1 .. Q - 1.

        Args:
            layer0_code: int [B, 1] or [B], the talker's code.
            layer0_embed: [B, 1, A] or [B, A], its embedding.
            last_talker_hidden: as `layer0_embed`.
            do_sample: False takes the largest logit in every row.
            temperature, top_p: a number, or float32 [B] on the device.
            top_k: an integer or None, or int32 or int64 [B] on the device.
            generator, generators, sample_uniforms: vLLM-Omni's ways of seeding; each makes this
                vLLM-Omni's own forward, without cache and streams.
            streams: int64 [N, 3], N > B, as `RowStreams.tensor`. Without it every row is unseeded, from
                the predictor's own global stream; that draws its numbers on the host, hence not in a graph.

        Returns:
            int64 [B, Q]: the talker's code and the residual ones, 0 in inactive rows.

        Raises:
            RuntimeError: no streams while a CUDA graph is being captured.
            ValueError: streams together with one of vLLM-Omni's ways; what `sample` refuses.
        """
        theirs = {"generator": generator, "generators": generators, "sample_uniforms": sample_uniforms}
        theirs = {name: value for name, value in theirs.items() if value is not None}
        if theirs:
            if streams is not None:
                raise ValueError(f"streams and {' and '.join(theirs)} exclude each other: give one of them")
            return super().forward(
                layer0_code, layer0_embed, last_talker_hidden, do_sample, temperature, top_k, top_p, **theirs
            )
        B = layer0_code.shape[0]
        frame = self.prepare(B)
        if streams is None:
            streams = self._unseeded_streams(frame, B)
        if not do_sample:
            temperature = 0.0
        inputs = layer0_code.reshape(B), layer0_embed.reshape(B, -1), last_talker_hidden.reshape(B, -1)
        if self._graphs is not None and not _capturing():
            codes, self.frame_sum = self._graphs.run(*inputs, streams, temperature, top_k, top_p)
            return codes.clone()

        def draw(codebook: int, logits: Tensor, out: Tensor, gather: Gather) -> None:
            sample(
                logits,
                streams,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                codebook=codebook,
                out=out,
                status=frame.buffers.status[:B, codebook],
                gather=gather,
            )

        codes, self.frame_sum = frame.run(*inputs, draw)
        return codes.clone()

    def _unseeded_streams(self, frame: Frame, rows: int) -> Tensor:
        if _capturing():
            raise RuntimeError(
                "a captured frame needs streams: without them every replay would draw the same codes"
            )
        if self._unseeded is None or self._unseeded.tensor.shape[0] <= rows:
            self._unseeded = RowStreams(frame.buffers.rows, frame.weights.device)
        return self._unseeded.pack([None] * rows, [0] * rows)


def _frame(weights: FrameWeights, buffers: FrameBuffers) -> Frame:
    if weights.device.type == "cuda":
        from .frame_kernels import FusedFrame  # Triton may be missing elsewhere

        if FusedFrame.supports(weights):
            return FusedFrame(weights, buffers)
    return Frame(weights, buffers)


def _max_rows(vllm_config) -> int:
    """Rows of the largest batch the engine can ask for: V1 pads to its capture sizes."""
    compilation = getattr(vllm_config, "compilation_config", None)
    captured = getattr(compilation, "max_cudagraph_capture_size", None)
    return max(int(vllm_config.scheduler_config.max_num_seqs), int(captured or 0))


def _has_full_graphs(vllm_config) -> bool:
    """Whether the runner captures `talker_mtp` as a whole, the predictor inside."""
    mode = getattr(getattr(vllm_config, "compilation_config", None), "cudagraph_mode", None)
    return mode is not None and mode.has_full_cudagraphs()


def _packs(model: torch.nn.Module) -> bool:
    weight = next(model.parameters())
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


@contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """Tensors made in inference mode could not be written outside it, by a reload of the weights."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
