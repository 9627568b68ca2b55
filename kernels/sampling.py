"""``sample``: from logits and row streams to codes, in one launch.

The operator ``rowseed::sample`` is opaque to torch.compile and to graph capture. CUDA tensors go to
the Triton kernel (``fused.py``), CPU tensors to the same arithmetic compiled by numba (``cpu.py``), or
where that cannot be had to the torch reference (``reference.py``); all give the same codes, bit for bit.
"""

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, library

from rowseed.kernels import reference
from rowseed.kernels.noise import FLOAT32_MAX

try:
    from rowseed.kernels import fused
except ModuleNotFoundError as error:  # Triton has no wheel for this platform
    if error.name != "triton":
        raise
    fused = None  # type: ignore[assignment]

logger = logging.getLogger("rowseed")

HAS_NUMBA = importlib.util.find_spec("numba") is not None
BACKENDS = ("triton", "numba", "torch")
LOGITS_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CODEBOOKS = 65536
"""Codebook indices have 16 bits of the counter."""


class Gather(NamedTuple):
    """What a frame does with a code as soon as it is drawn; active rows only, logits [B, V]."""

    table: Tensor  # [>= V, D] raw embedding
    total: Tensor  # float32 [B, D]: total[row] += float32(table[code])
    next_table: Tensor | None = None  # [>= V, E] the embedding that the next step reads
    next_input: Tensor | None = None  # [B, E], next_table's dtype: next_input[row] = next_table[code]


def sample(
    logits: Tensor,  # [B, V] or [B, C, V], float32, float16 or bfloat16
    streams: Tensor,  # int64 [N, 3], N > B
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    codebook: int = 0,
    out: Tensor | None = None,
    status: Tensor | None = None,
    logprob: Tensor | None = None,
    gather: Gather | None = None,
    backend: str | None = None,
) -> Tensor:
    """Draws one code a row (and codebook) from softmax(logits / temperature) after top-k and top-p.

    The draw is Gumbel-max with noise addressed by (seed, offset, codebook, token id) alone, so a
    row's code does not depend on its batch, its place there, the launch or the backend.

    Parameters
    ----------
    logits : Raw scores, never probabilities. Any strides whose last is 1. NaN and -inf are never
        drawn, +inf counts as the largest float32.
    streams : What ``RowStreams.pack`` returns: line 0 holds the global seed, the global offset and
        the number of rows in use, line 1 + r the seed, offset and flags of row r.
    temperature : Number in [0, inf) or float32 [B]. Below 1e-5 the row takes its largest logit.
    top_k : Integer or int32/int64 [B]. Ties at the k-th value are all kept. None, 0, negative and
        anything from V up: off.
    top_p : Number in [0, 1] or float32 [B]. A token stays if the kept tokens of strictly larger
        value have less than this share of the mass; 1 is off.
    min_p : Number in [0, 1] or float32 [B]. Between temperature and top-k: a token stays if its probability
        is at least this share of the largest one's, that is if (x - max x) * log2(e) / temperature is
        at least ``noise.log2(min_p)``; 0, and anything below 2**-126, is off.
    codebook : Index of the first codebook, 0 <= codebook and codebook + C <= 65536.
    out : int64 [B] or [B, C], any strides, written and returned.
    status : int32 of out's shape: 1 NaN met, 2 +inf met, 4 nothing alive (code 0), 8 temperature or
        top_p or min_p out of range in a tensor (drawn greedily); or-ed.
    logprob : float32 of out's shape: natural logarithm of the code's probability among what the filters
        kept, at this temperature (``noise.log_share``); 0 for a greedy row. Same bits on every backend.
    gather : Epilogue for logits [B, V]: embedding sums and the next step's input.
    backend : "triton", "numba" (CPU tensors only), "torch", or None for the device's own: Triton for
        CUDA; numba for a CPU, or torch where numba is missing or fails, which is logged once. The first
        draw with numba in a process takes some seconds to compile.

    Rows at or past the streams' number of rows, and those flagged inactive, get code 0; nothing
    else of theirs is read or written.

    Returns int64 [B] or [B, C]. Raises TypeError or ValueError, naming the argument, before launch.
    """
    _check_logits(logits)
    B = logits.shape[0]
    C = logits.shape[1] if logits.dim() == 3 else 1
    V = logits.shape[-1]
    _check_tensor("streams", streams, "[N, 3]", (torch.int64,), logits.device)
    if streams.dim() != 2 or streams.shape[1] != 3 or streams.shape[0] < B + 1:
        raise ValueError(f"streams must have shape [N, 3] with N >= {B + 1}, got {list(streams.shape)}")
    if not streams.is_contiguous():
        raise ValueError(f"streams must be contiguous, got strides {streams.stride()}")

    temperature_number, temperatures = 1.0, None
    if isinstance(temperature, Tensor):
        temperatures = _check_rows("temperature", temperature, (torch.float32,), B, logits.device)
    else:
        temperature_number = _check_number("temperature", temperature, FLOAT32_MAX)
    top_k_number, top_ks = 0, None
    if isinstance(top_k, Tensor):
        top_ks = _check_rows("top_k", top_k, (torch.int32, torch.int64), B, logits.device)
    elif top_k is not None:
        top_k_number = _check_integer("top_k", top_k)
        top_k_number = top_k_number if 0 < top_k_number < V else 0
    top_p_number, top_ps = 1.0, None
    if isinstance(top_p, Tensor):
        top_ps = _check_rows("top_p", top_p, (torch.float32,), B, logits.device)
    else:
        top_p_number = _check_number("top_p", top_p, 1.0)
    min_p_number, min_ps = 0.0, None
    if isinstance(min_p, Tensor):
        min_ps = _check_rows("min_p", min_p, (torch.float32,), B, logits.device)
    else:
        min_p_number = _check_number("min_p", min_p, 1.0)
    codebook = _check_integer("codebook", codebook)
    if codebook < 0 or codebook + C > CODEBOOKS:
        raise ValueError(f"codebook must be in [0, {CODEBOOKS - C}] for {C} codebook(s), got {codebook}")

    shape = logits.shape[:-1]
    if out is None:
        out = torch.empty(shape, dtype=torch.int64, device=logits.device)
    else:
        _check_shape("out", out, shape, (torch.int64,), logits.device)
    if status is not None:
        _check_shape("status", status, shape, (torch.int32,), logits.device)
    if logprob is not None:
        _check_shape("logprob", logprob, shape, (torch.float32,), logits.device)
    table = total = next_table = next_input = None
    if gather is not None:
        _check_gather(gather, logits)
        table, total, next_table, next_input = gather

    _sample_op(
        logits, streams, temperature_number, temperatures, top_k_number, top_ks, top_p_number, top_ps,
        min_p_number, min_ps, codebook, out, status, logprob, table, total, next_table, next_input,
        _resolve(backend, logits.device),
    )  # fmt: skip
    return out


def _run(
    logits: Tensor,
    streams: Tensor,
    temperature: float,
    temperatures: Tensor | None,
    top_k: int,
    top_ks: Tensor | None,
    top_p: float,
    top_ps: Tensor | None,
    min_p: float,
    min_ps: Tensor | None,
    codebook: int,
    out: Tensor,
    status: Tensor | None,
    logprob: Tensor | None,
    table: Tensor | None,
    total: Tensor | None,
    next_table: Tensor | None,
    next_input: Tensor | None,
    backend: str,
) -> None:
    if out.numel() == 0:
        return
    if logits.dim() == 2:
        logits, out = logits.unsqueeze(1), out.unsqueeze(1)
        status = None if status is None else status.unsqueeze(1)
        logprob = None if logprob is None else logprob.unsqueeze(1)
    arguments = (
        logits, streams, float(np.float32(temperature)), temperatures, top_k, top_ks,
        float(np.float32(top_p)), top_ps, float(np.float32(min_p)), min_ps, codebook, out, status, logprob,
        table, total, next_table, next_input,
    )  # fmt: skip
    if backend == "torch":
        reference.sample(*arguments)
    elif backend == "numba":
        _cpu_sample()(*arguments)
    elif logits.is_cuda and logits.device.index != torch.cuda.current_device():
        with torch.cuda.device(logits.device):
            fused.sample(*arguments)
    else:
        fused.sample(*arguments)


_operators = library.Library("rowseed", "FRAGMENT")
_operators.define(
    "sample(Tensor logits, Tensor streams, float temperature, Tensor? temperatures, int top_k,"
    " Tensor? top_ks, float top_p, Tensor? top_ps, float min_p, Tensor? min_ps, int codebook,"
    " Tensor(a!) out, Tensor(b!)? status, Tensor(e!)? logprob, Tensor? table, Tensor(c!)? total,"
    " Tensor? next_table, Tensor(d!)? next_input, str backend) -> ()"
)
_operators.impl("sample", _run, "CompositeExplicitAutograd")
_sample_op = torch.ops.rowseed.sample.default


@library.register_fake("rowseed::sample", lib=_operators)
def _fake(*_: object) -> None:
    """Every result is an argument, so shapes are the caller's."""


@functools.cache
def _cpu_sample() -> Callable[..., None]:
    """Numba's way, compiled now; the torch reference if that fails in any way."""
    try:
        from rowseed.kernels import cpu
    except Exception as error:
        logger.warning(
            "rowseed: CPU tensors are sampled by the torch reference, with the same codes but slowly:"
            " numba cannot be used (%s: %s)", type(error).__name__, error,
        )  # fmt: skip
        return reference.sample
    return cpu.sample


def _resolve(backend: str | None, device: torch.device) -> str:
    if backend is None:
        return "numba" if device.type == "cpu" else "triton"
    if backend not in BACKENDS:
        raise ValueError(f"backend must be None, 'triton', 'numba' or 'torch', got {backend!r}")
    if backend == "numba" and device.type != "cpu":
        raise ValueError(f"backend must be 'triton' or 'torch' for tensors on {device}, got 'numba'")
    if backend == "numba" and not HAS_NUMBA:
        raise ValueError("backend must be 'torch' where numba is not installed, got 'numba'")
    if backend == "triton" and fused is None:
        raise ValueError("backend must be 'torch' where Triton is not installed, got 'triton'")
    if backend == "triton" and device.type == "cpu" and not fused.INTERPRETED:
        raise ValueError(
            "backend must be 'numba' or 'torch' for CPU tensors, got 'triton' (Triton's interpreter runs it"
            " there if TRITON_INTERPRET=1 is set before triton is imported)"
        )
    return backend


def _check_logits(logits: Tensor) -> None:
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits must be a tensor, got {type(logits).__name__}")
    if logits.dim() not in (2, 3):
        raise ValueError(f"logits must have shape [B, V] or [B, C, V], got {list(logits.shape)}")
    if logits.dtype not in LOGITS_DTYPES:
        raise TypeError(f"logits must be float32, float16 or bfloat16, got {logits.dtype}")
    if not 1 <= logits.shape[-1] < 2**31:
        raise ValueError(f"logits must have 1 <= V < 2**31 tokens, got {list(logits.shape)}")
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        raise ValueError(f"logits must have a last stride of 1, got strides {logits.stride()}")


def _check_tensor(
    name: str, tensor: Tensor, shape: str, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor of shape {shape}, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        accepted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must be {accepted}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on the logits' device {device}, got {tensor.device}")


def _check_shape(
    name: str,
    tensor: Tensor,
    shape: torch.Size | tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    _check_tensor(name, tensor, str(list(shape)), dtypes, device)
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")


def _check_rows(
    name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], B: int, device: torch.device
) -> Tensor:
    _check_shape(name, tensor, (B,), dtypes, device)
    return tensor


def _check_number(name: str, value: float, largest: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number or a float32 [B] tensor, got {value!r}")
    if not 0 <= value <= largest:
        raise ValueError(f"{name} must be in [0, {largest:.8g}], got {value!r}")
    return float(value)


def _check_integer(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    return int(value)


def _check_gather(gather: Gather, logits: Tensor) -> None:
    table, total, next_table, next_input = gather
    if logits.dim() != 2:
        raise ValueError(f"gather needs logits of shape [B, V], got {list(logits.shape)}")
    B = logits.shape[0]
    _check_table("gather.table", table, logits)
    _check_shape("gather.total", total, (B, table.shape[1]), (torch.float32,), logits.device)
    if (next_table is None) != (next_input is None):
        given = "next_input" if next_table is None else "next_table"
        raise ValueError(f"gather.next_table and gather.next_input must come together, got only {given}")
    rows = [("gather.total", total)]
    if next_table is not None and next_input is not None:
        _check_table("gather.next_table", next_table, logits)
        shape = (B, next_table.shape[1])
        _check_shape("gather.next_input", next_input, shape, (next_table.dtype,), logits.device)
        rows.append(("gather.next_input", next_input))
    for name, tensor in rows:
        if tensor.stride(1) != 1 and tensor.shape[1] > 1:
            raise ValueError(f"{name} must have a last stride of 1, got strides {tensor.stride()}")


def _check_table(name: str, table: Tensor, logits: Tensor) -> None:
    _check_tensor(name, table, "[>= V, D]", LOGITS_DTYPES, logits.device)
    if table.dim() != 2 or table.shape[0] < logits.shape[-1]:
        raise ValueError(f"{name} must have shape [>= {logits.shape[-1]}, D], got {list(table.shape)}")
    if table.stride(1) != 1 and table.shape[1] > 1:
        raise ValueError(f"{name} must have a last stride of 1, got strides {table.stride()}")
