"""Calls of the sampler, and rows that take every way through the kernel."""

from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import torch
from executed import Run, executing

from rowseed.kernels import fused
from rowseed.kernels.sampling import Gather, sample
from rowseed.kernels.streams import RowStreams

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAN, INF = float("nan"), float("inf")

TEMPERATURES = [0.9, 0.9, 0.9, 1.0, 0.1, 5.0, 1e-5, 9.9e-6, 0.0, 1e38, NAN, -1.0, INF, 0.7]
TOP_KS = [50, 50, 50, 1, 2, 4, 5, 32, 64, 127, 128, 129, 0, -1, 2048, 5000, 100]
TOP_PS = [1.0, 0.9, 0.9, 0.5, 0.05, 0.0, 1e-8, 0.999, NAN, -0.1, 1.5]
MIN_PS = [0.0, 0.05, 0.2, 1.0, 1e-30, 1e-39, NAN, 2.0]


def ordinary(rows: int, V: int, seed: int) -> torch.Tensor:
    """float32 [rows, V]: normal logits of sd 3."""
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3


def adversarial(V: int, seed: int) -> torch.Tensor:
    """float32 [N, V]: ties, dead and special values, and large ones where few threads hold them."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.arange(V)

    def normal():
        return torch.randn(V, generator=random)

    def shuffled(row):
        return row[torch.randperm(V, generator=random)]

    def tied_top(n):
        return torch.where(ids < n, 5.0, -1.0 - (ids % 97) / 32)

    def alive(n, row):
        return torch.where(shuffled(ids) < n, row, -INF)

    thread = ids // 8 % 128
    flat = [torch.zeros(V), torch.full((V,), -3.5), torch.full((V,), -3.4e38)]
    tied = [(ids % 2).float(), (ids % 7).float(), shuffled((ids // 3).float()), shuffled((ids // 64).float())]
    tied += [shuffled(tied_top(n)) for n in (1, 2, 49, 50, 51, 60, 127, 128, 129, 200)]
    tied += [tied_top(50), tied_top(128).flip(0), tied_top(129)]
    sloped = [ids / 64, -ids / 64, shuffled(ids.float())]
    scaled = [normal() * 0.01, normal() * 100, normal() + 1e6, normal().abs() * 1e-40, normal() * 1e37]
    sparse = [alive(n, normal()) for n in (0, 1, 2, 31, 49, 50, 51, 128, 129)] + [alive(40, torch.ones(V))]
    lumped = [
        torch.where(where, normal() + 20, normal())
        for where in (thread < 32, thread == 5, thread % 32 == 7, ids % 8 == 3, ids < V // 2, ids >= V - 60)
    ]
    signed = [torch.where(ids % 2 == 0, 0.0, -0.0), torch.where(ids % 3 == 0, -0.0, -1.0)]
    peaks = [torch.where(ids == at, 30.0, normal()) for at in (0, V - 1)]
    peaks += [torch.where(ids == V // 3, 3.4e38, normal()), torch.where(ids % 5 == 0, -3.4e38, 3.4e38)]
    skewed = [normal().exp(), -normal().exp() * 10]
    special = []
    for n, value in ((1, NAN), (3, NAN), (V, NAN), (1, INF), (2, INF), (60, INF), (V, INF)):
        special.append(torch.where(shuffled(ids) < n, value, normal()))
    mixed = normal()
    mixed[0], mixed[V // 2], mixed[-1] = NAN, INF, -INF
    return torch.stack(
        [*flat, *tied, *sloped, *scaled, *sparse, *lumped, *signed, *peaks, *skewed, *special, mixed]
    ).float()


def mixed_rows(V: int, seed: int, few: int = 16) -> torch.Tensor:
    return torch.cat([ordinary(few, V, seed), adversarial(V, seed)])


def a_few_rows(V: int, seed: int) -> torch.Tensor:
    """Some of each kind, for variants whose rows are long."""
    return torch.cat([ordinary(4, V, seed), adversarial(V, seed)[::6]])


def ordinary_rows(V: int, seed: int) -> torch.Tensor:
    return ordinary(64 if V <= 8192 else 8, V, seed)


@dataclass(frozen=True)
class Case:
    """One way to call `sample`. A list of parameters becomes a [B] tensor, values drawn from it."""

    name: str
    V: int = 2048
    dtype: torch.dtype = BF16
    C: int | None = None
    rows: Callable[[int, int], torch.Tensor] = mixed_rows
    temperature: float | list = 0.9
    top_k: int | list = 50
    top_p: float | list = 1.0
    min_p: float | list = 0.0
    top_k_dtype: torch.dtype = torch.int32
    logprob: bool = False
    D: int = 0  # columns of the embedding that is summed; 0: no gather
    E: int = 0  # of the next step's
    table_dtype: torch.dtype | None = None
    inactive: bool = False  # some rows flagged so, the last ones past those in use
    column: bool = False  # codes go to a column of a wider tensor
    gap: int = 0  # elements between the rows of the logits
    shift: int = 0  # elements that the logits start after an aligned address

    def logits(self, seed: int = 0) -> torch.Tensor:
        values = self.rows(self.V, seed).to(self.dtype)
        if self.C:
            values = values[: len(values) // self.C * self.C].reshape(-1, self.C, self.V)
        strides = [self.V + self.gap, 1]
        if self.C:
            strides.insert(0, self.C * strides[0])
        size = self.shift + values.shape[0] * strides[0] + 16
        memory = torch.full((size,), NAN, dtype=self.dtype)
        return memory.as_strided(values.shape, strides, self.shift).copy_(values)

    def parameters(self, B: int, seed: int = 0) -> dict:
        kinds = {"temperature": F32, "top_k": self.top_k_dtype, "top_p": F32, "min_p": F32}
        random = np.random.default_rng(seed)
        found = {}
        for name, dtype in kinds.items():
            value = getattr(self, name)
            found[name] = (
                torch.tensor(random.choice(value, B), dtype=dtype) if isinstance(value, list) else value
            )
        return found

    def streams(self, B: int, seed: int = 0) -> torch.Tensor:
        random = np.random.default_rng(seed)
        seeds = [
            None if i % 4 == 3 else int(s) for i, s in enumerate(random.integers(-(2**63), 2**63 - 1, B))
        ]
        offsets = random.choice([0, 1, 7, 2**31, 2**32 - 1, 2**40, -1], B).tolist()
        lines = RowStreams(max_rows=B, device="cpu", global_seed=2**40 + 5, global_offset=2**32 - 20)
        used = B - 3 if self.inactive else B
        packed = lines.pack(seeds=seeds[:used], offsets=offsets[:used], padded_rows=B).clone()
        if self.inactive:
            packed[1:6:2, 2] |= 2
        return packed

    def draw(self, backend: str, seed: int = 0) -> dict[str, torch.Tensor]:
        """Every tensor that `sample` writes, by name."""
        logits = self.logits(seed)
        B, shape = logits.shape[0], logits.shape[:-1]
        outputs = {"out": torch.full((*shape, 16), -7)[..., 3] if self.column else torch.full(shape, -7)}
        outputs["status"] = torch.full(shape, -7, dtype=torch.int32)
        if self.logprob:
            outputs["logprob"] = torch.full(shape, 7.0)
        gather, gathered = None, {}
        if self.D:
            random = torch.Generator().manual_seed(seed)
            dtype = self.table_dtype or self.dtype
            gathered["total"] = torch.arange(B * self.D).reshape(B, self.D) / 64
            table = torch.randn(self.V, self.D, generator=random).to(dtype)
            following = (None, None)
            if self.E:
                gathered["next_input"] = torch.full((B, self.E), -7.0, dtype=dtype)
                following = torch.randn(self.V, self.E, generator=random).to(dtype), gathered["next_input"]
            gather = Gather(table, gathered["total"], *following)
        sample(
            logits, self.streams(B, seed), codebook=3, backend=backend, gather=gather, **outputs,
            **self.parameters(B, seed),
        )  # fmt: skip
        return outputs | gathered

    def execute(self, target: str, seed: int = 0, **options) -> tuple[dict[str, torch.Tensor], list[Run]]:
        """What the compiled kernel writes, and its runs; options: of `executing`."""
        with patch.object(fused, "INTERPRETED", True), executing(target, **options) as runs:
            return self.draw("triton", seed), runs


def differences(wanted: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> dict[str, int]:
    """Elements whose bits differ, by tensor; empty where none do."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    found = {}
    for name, tensor in wanted.items():
        kind = kinds[tensor.element_size()]
        count = int((tensor.contiguous().view(kind) != got[name].contiguous().view(kind)).sum())
        if count:
            found[name] = count
    return found


SHORT = [Case("k 50"), Case("k 50, top_p 0.9", top_p=0.9)]
"""What `make test` runs."""


def _variants() -> list[Case]:
    everything = dict(temperature=TEMPERATURES, top_k=TOP_KS, top_p=TOP_PS, min_p=MIN_PS, logprob=True)
    usual = dict(temperature=[0.9, 0.7, 1.0, 3.0], top_k=[50, 20, 1, 64, 100, 128])
    cases = []
    for name, dtype in (("bf16", BF16), ("fp16", F16), ("fp32", F32)):
        cases += [
            Case(f"{name}, k 50", dtype=dtype),
            Case(f"{name}, k 50, top_p 0.9", dtype=dtype, top_p=0.9),
            Case(f"{name}, everything in tensors, gather", dtype=dtype, D=1024, E=1024, **everything),
        ]
    cases += [Case(f"k {k}", top_k=k) for k in (0, 1, 127, 128, 129)]
    cases += [
        Case("greedy", temperature=0.0),
        Case("k as int64", top_k=TOP_KS, top_k_dtype=torch.int64),
        Case("min_p", min_p=0.05),
        Case("min_p, top_p, logprob", min_p=0.05, top_p=0.9, logprob=True),
        Case("k 0, top_p, logprob", top_k=0, top_p=0.9, logprob=True),
        Case("fp32, k 0, top_p, min_p", dtype=F32, top_k=0, top_p=0.9, min_p=0.02),
        Case("gather of other widths, inactive", D=1000, E=2048, table_dtype=F32, column=True, inactive=True),
        Case("gather of one table", D=7, table_dtype=F16),
        Case("[B, 5, V], inactive", C=5, inactive=True, column=True),
        Case("rows apart by 2064", gap=16),
        Case("rows apart by 2051", gap=3),
        Case("base at 2 bytes", shift=1, gap=8),
        Case("fp32, V 2047, base at 4 bytes", V=2047, dtype=F32, shift=1, **everything),
        Case("V 1", V=1, dtype=F32, rows=ordinary_rows, temperature=TEMPERATURES),
        Case("V 10", V=10, dtype=F32, rows=ordinary_rows, **everything | dict(top_k=[2, 4, 8, 50, 0])),
        Case("V 64", V=64, rows=ordinary_rows, **everything),
        Case("fp32, V 1025", V=1025, dtype=F32, **everything),
        *(Case(f"V {V}", V=V, top_p=0.9) for V in (1024, 2049, 3072, 4096)),
        Case("V 8192", V=8192, rows=a_few_rows),
        Case("fp32, V 8192", V=8192, dtype=F32, rows=a_few_rows, **everything),
        Case("V 8193, split", V=8193, rows=a_few_rows, logprob=True, **usual),
        Case("V 16384, split", V=16384, rows=a_few_rows),
        Case("fp32, V 16384, split", V=16384, dtype=F32, rows=a_few_rows, **everything),
        Case("V 16384, k 0, top_p", V=16384, rows=a_few_rows, top_k=0, top_p=0.9, logprob=True),
        Case("[B, 3, 12288], split, inactive", V=12288, C=3, rows=a_few_rows, inactive=True, **usual),
        Case("V 262144, split", V=262144, rows=lambda V, seed: ordinary(2, V, seed)),
    ]  # fmt: skip
    return cases


VARIANTS = _variants()
"""What `make test-compiled` runs for every target."""
