"""The samplers that bench/sampler.py compares: this project's and its peers', on the same inputs.

Each class draws one code a row. `draw(codebook)` is what is timed; `before()` is host work that an
implementation does once a frame (15 codes); `advance(step)` moves to another step of every row's
randomness, for the correctness check. A class that cannot run a case raises Unavailable, with the
reason, when it is made.
"""

import contextlib
import importlib.util
import os
import sys
import types
from typing import ClassVar, NamedTuple

import torch
import triton
import triton.language as tl

from rowseed.kernels.sampling import sample
from rowseed.kernels.streams import RowStreams

SEED = 1000
"""Row r's seed is SEED + r."""

DRY_RUN = "ROWSEED_BENCH_DRY_RUN"
"""Set to 1 in the environment of a dry run, beside TRITON_INTERPRET."""

EPS = 1e-20
"""Ends of the interval from which vLLM-Omni 0.30 draws its uniforms."""


class Unavailable(Exception):  # noqa: N818 - not an error: the reason why a peer is skipped
    """Why an implementation cannot run a case here."""


class Case(NamedTuple):
    batch: int
    vocab: int
    dtype: torch.dtype
    top_k: int
    top_p: float
    seeded: str  # "all", "half" (every second row) or "none"
    temperature: float = 0.9

    @property
    def seeds(self) -> list[int | None]:
        every = {"all": 1, "half": 2, "none": 0}[self.seeded]
        return [SEED + row if every and row % every == 0 else None for row in range(self.batch)]

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"B={self.batch} V={self.vocab} {kind} k={self.top_k} p={self.top_p} seeded={self.seeded}"


class Sampler:
    """One implementation, ready to draw from logits [S, B, V]; codebook c uses logits[c % S]."""

    name: ClassVar[str]
    peer = True
    uncapturable = ""
    """Why a CUDA graph cannot hold it, if so."""

    def __init__(self, case: Case, logits: torch.Tensor) -> None:
        self.case, self.logits, self.device = case, logits, logits.device
        self.setup()

    def setup(self) -> None:
        """Allocate; raise Unavailable for a case that cannot run."""

    def before(self) -> None:
        """Host work of one frame."""

    def advance(self, step: int) -> None:
        """Use step `step` of each row's randomness from now on."""

    def draw(self, codebook: int = 0) -> torch.Tensor:
        """Codes [B] from the logits of `codebook`."""
        raise NotImplementedError

    def of(self, codebook: int) -> torch.Tensor:
        return self.logits[codebook % len(self.logits)]

    def filled(self, value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((self.case.batch,), value, dtype=dtype, device=self.device)

    def generators(self) -> list[torch.Generator | None]:
        """One generator a seeded row, as a server keeps them; None for the others."""
        made = [None if seed is None else torch.Generator(self.device) for seed in self.case.seeds]
        for generator, seed in zip(made, self.case.seeds, strict=True):
            if generator is not None:
                generator.manual_seed(seed)
        return made


class Rowseed(Sampler):
    """This project: the draw alone, its streams packed once; what packing costs is bench/host.py's."""

    name = "rowseed"
    peer = False

    def setup(self) -> None:
        self.rows = RowStreams(self.case.batch, self.device, global_seed=11)
        self.temperature = self.filled(self.case.temperature, torch.float32)
        self.top_k = self.filled(self.case.top_k, torch.int32)
        # top_p = 1 goes in as a number: that is how the filter is known to be off before launch.
        self.top_p = self.filled(self.case.top_p, torch.float32) if self.case.top_p < 1 else 1.0
        self.codes = torch.zeros(self.case.batch, 15, dtype=torch.int64, device=self.device)
        self.step = 0
        self.advance(0)

    def advance(self, step: int) -> None:
        self.step = step
        self.streams = self.rows.pack(self.case.seeds, [step] * self.case.batch)

    def draw(self, codebook: int = 0) -> torch.Tensor:
        return sample(
            self.of(codebook),
            self.streams,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            codebook=codebook,
            out=self.codes[:, codebook],
            backend="triton" if interpreted() else None,
        )

    def reference(self, codebook: int = 0) -> torch.Tensor:
        """The torch reference's codes for the same inputs, on the CPU."""
        return sample(
            self.of(codebook).cpu(),
            self.streams.cpu(),
            temperature=self.case.temperature,
            top_k=self.case.top_k,
            top_p=self.case.top_p,
            codebook=codebook,
            backend="torch",
        )


class RowseedPacked(Rowseed):
    """This project with its streams packed anew for each frame, as a server does."""

    name = "rowseed, packed each frame"

    def setup(self) -> None:
        if self.device.type == "cpu" and not interpreted():
            raise Unavailable("packing is once a frame of 15 draws; on a CPU bench/host.py measures it")
        super().setup()

    def before(self) -> None:
        self.advance(self.step)


class OmniChain(Sampler):
    """vLLM-Omni's own chain (CodePredictorWrapper.forward): scale, top-k, mask, then its Gumbel draw."""

    def setup(self) -> None:
        if self.case.top_p != 1:
            raise Unavailable("vLLM-Omni's predictor raises NotImplementedError for top_p != 1")
        with quiet():
            try:
                from vllm_omni.model_executor.models.common.qwen3_code_predictor import CodePredictorWrapper
            except ImportError as error:
                raise Unavailable(f"vllm-omni cannot be imported: {error}") from error
        self.sample = CodePredictorWrapper._sample_codes_gumbel
        self.inverse = 1.0 / self.case.temperature

    def noise(self, codebook: int) -> dict:
        raise NotImplementedError

    def draw(self, codebook: int = 0) -> torch.Tensor:
        scaled = self.of(codebook) * self.inverse
        kept, _ = scaled.topk(self.case.top_k, dim=-1)
        scaled = scaled.masked_fill(scaled < kept[:, -1:], float("-inf"))
        return self.sample(scaled, **self.noise(codebook)).reshape(-1)


class OmniGenerators(OmniChain):
    """A list of generators, None for unseeded rows; no list where no row is seeded (V1, per row)."""

    name = "vllm-omni, generator a row"

    def setup(self) -> None:
        super().setup()
        self.generator = None if self.case.seeded == "none" else self.generators()
        if self.generator is not None:
            self.uncapturable = "its host generators do not follow a graph: the seed has no effect there"

    def noise(self, codebook: int) -> dict:
        return {"generator": self.generator}


class OmniGenerator(OmniChain):
    """One generator for the whole batch: what a batch of one gets, and the chain's cost without a loop."""

    name = "vllm-omni, one generator"
    uncapturable = "its host generator does not follow a graph"

    def setup(self) -> None:
        if self.case.seeded != "all":
            raise Unavailable("one generator seeds the whole batch")
        super().setup()
        self.generator = torch.Generator(self.device).manual_seed(SEED)

    def noise(self, codebook: int) -> dict:
        return {"generator": self.generator}


class OmniUniforms(OmniChain):
    """Uniforms made beforehand (V2), whose making is not timed here."""

    name = "vllm-omni, uniforms ready"

    def setup(self) -> None:
        super().setup()
        case = self.case
        self.row_generators = self.generators()
        self.uniforms = torch.empty(case.batch, len(self.logits), case.vocab, device=self.device)
        self.fill()

    def fill(self) -> None:
        """As OmniModelState._prepare_mtp_sample_uniforms does it once a frame."""
        if self.case.seeded == "none":
            self.uniforms.uniform_(EPS, 1.0 - EPS)
            return
        for row, generator in enumerate(self.row_generators):
            self.uniforms[row : row + 1].uniform_(EPS, 1.0 - EPS, generator=generator)

    def advance(self, step: int) -> None:
        self.fill()

    def noise(self, codebook: int) -> dict:
        return {"uniforms": self.uniforms[:, codebook % len(self.logits)]}


class OmniFilledUniforms(OmniUniforms):
    """The same with the buffer filled row by row from the host for each frame, as V2 does."""

    name = "vllm-omni, uniforms filled"

    def before(self) -> None:
        self.fill()

    def advance(self, step: int) -> None:
        """The frame's own fill advances the generators."""


class Multinomial(Sampler):
    """Softmax over what top-k and top-p keep, then torch.multinomial with each row's generator."""

    name = "torch.multinomial a row"

    def setup(self) -> None:
        self.row_generators = self.generators()
        if self.case.seeded != "none":
            self.uncapturable = "its host generators do not follow a graph"

    def draw(self, codebook: int = 0) -> torch.Tensor:
        case = self.case
        scaled = self.of(codebook).float() / case.temperature
        values, tokens = scaled.topk(min(case.top_k, case.vocab), dim=-1)
        probabilities = values.softmax(-1)
        if case.top_p < 1:
            above = probabilities.cumsum(-1) - probabilities
            probabilities = probabilities.masked_fill(above >= case.top_p, 0)
        if case.seeded == "none":
            ranks = torch.multinomial(probabilities, 1)
        else:
            rows = zip(probabilities.split(1), self.row_generators, strict=True)
            ranks = torch.cat([torch.multinomial(row, 1, generator=generator) for row, generator in rows])
        return tokens.gather(1, ranks).reshape(-1)


class VllmV2(Sampler):
    """vLLM's V2 sampler: float32 copy, temperature, top-k/top-p and Gumbel kernels, every row seeded."""

    name = "vllm v2"

    def setup(self) -> None:
        self.gumbel, self.filter = vllm_kernels(self.device)
        rows = torch.arange(self.case.batch, device=self.device)
        self.rows, self.seeds, self.positions = rows.int(), rows + SEED, rows * 0
        self.temperature = self.filled(self.case.temperature, torch.float32)
        self.top_k = self.filled(self.case.top_k, torch.int32)
        self.top_p = self.filled(self.case.top_p, torch.float32) if self.case.top_p < 1 else None

    def advance(self, step: int) -> None:
        self.positions.fill_(step)

    def draw(self, codebook: int = 0) -> torch.Tensor:
        scores = torch.empty_like(self.of(codebook), dtype=torch.float32).copy_(self.of(codebook))
        self.gumbel.apply_temperature(scores, self.rows, self.temperature)
        scores = self.filter(scores, self.top_k, self.top_p)
        positions = self.positions + codebook
        return self.gumbel.gumbel_sample(
            scores,
            self.rows,
            self.temperature,
            self.seeds,
            positions,
            apply_temperature=False,
            is_drafting=False,
        )


class FlashInfer(Sampler):
    """FlashInfer's sampling kernels. A row's seed is also mixed with its place in the batch there."""

    name = "flashinfer"

    def setup(self) -> None:
        if self.device.type != "cuda":
            raise Unavailable("its kernels run on CUDA only")
        try:
            import flashinfer
        except ImportError as error:
            raise Unavailable(f"flashinfer cannot be imported: {error}") from error
        self.ops = flashinfer.sampling
        self.top_k = self.filled(self.case.top_k, torch.int32)
        self.top_p = self.filled(self.case.top_p, torch.float32)
        self.seeds = torch.arange(self.case.batch, device=self.device) + SEED
        self.offsets = torch.zeros_like(self.seeds)

    def advance(self, step: int) -> None:
        self.offsets.fill_(step * 4096)  # more than a draw's rejection rounds use up

    def draw(self, codebook: int = 0) -> torch.Tensor:
        seeds = {} if self.case.seeded == "none" else {"seed": self.seeds, "offset": self.offsets}
        scaled = self.of(codebook).float() / self.case.temperature
        if self.case.top_p < 1:
            codes = self.ops.top_k_top_p_sampling_from_logits(scaled, self.top_k, self.top_p, **seeds)
        else:
            codes = self.ops.top_k_sampling_from_probs(scaled.softmax(-1), self.top_k, **seeds)
        return codes.reshape(-1)


class SglangOmni(Sampler):
    """sglang-omni's fused Qwen3-TTS sampler: bfloat16, V = 2048, every row seeded."""

    name = "sglang-omni"

    def setup(self) -> None:
        case = self.case
        self.kernels = sglang_kernels()
        if case.vocab != self.kernels.FUSED_SAMPLER_VOCAB_SIZE or case.dtype != torch.bfloat16:
            raise Unavailable("its fused kernel takes bfloat16 and V = 2048 only")
        if self.device.type != "cuda" and not interpreted():
            raise Unavailable("its kernels are Triton's: they need a GPU, or the interpreter (--dry-run)")
        self.temperature = self.filled(case.temperature, torch.float32)
        self.top_k = self.filled(case.top_k, torch.int64)
        self.top_p = self.filled(case.top_p, torch.float32)
        self.seeds = torch.arange(case.batch, device=self.device) + SEED
        self.interpreted_codes: dict[int, torch.Tensor] = {}
        self.positions = torch.zeros(15, case.batch, dtype=torch.int64, device=self.device)
        self.advance(0)

    def advance(self, step: int) -> None:
        self.positions.copy_(
            (step * 15 + torch.arange(15, device=self.device))[:, None].expand_as(self.positions)
        )

    def draw(self, codebook: int = 0) -> torch.Tensor:
        rows = (self.temperature, self.top_k, self.top_p, self.seeds, self.positions[codebook])
        k, has_top_p = self.case.top_k, self.case.top_p < 1
        if self.device.type != "cuda":
            return self.interpret(self.of(codebook), *rows, k, has_top_p)
        codes = self.kernels.sample_from_logits_with_seed_top_k_top_p(
            self.of(codebook), *rows, max_top_k=k, has_top_p=has_top_p
        )
        if codes is None:
            raise Unavailable("its fused sampler refused these inputs")
        return codes

    def interpret(self, logits: torch.Tensor, temperature, top_k, top_p, seeds, positions, k, has_top_p):
        """Its single kernel, as its host function launches it; that function itself asks for CUDA tensors.

        A row takes seconds, so each position is run once.
        """
        if (place := int(positions[0])) in self.interpreted_codes:
            return self.interpreted_codes[place]
        codes = self.interpreted_codes[place] = torch.empty(self.case.batch, dtype=torch.int64)
        self.kernels.seeded_top_k_top_p_sample_kernel[(self.case.batch,)](
            *(logits, temperature, top_k, top_p, seeds, positions, codes),
            *(logits.stride(0), k, self.kernels.fused_raw_logit_block_k(k), has_top_p),
            num_warps=8,
        )
        return codes


@triton.jit
def _log1p(x):
    # The interpreter has no libdevice; used in dry runs only, where the last bits do not matter.
    return tl.log(1.0 + x)


@triton.jit
def _empty_kernel(codes_ptr):
    pass


class Floor(Sampler):
    """What one launch costs that does nothing: an empty Triton kernel, on a CPU an empty call to torch."""

    name = "floor"

    def setup(self) -> None:
        self.codes = torch.zeros(self.case.batch, dtype=torch.int64, device=self.device)

    def draw(self, codebook: int = 0) -> torch.Tensor:
        if self.device.type == "cuda" or interpreted():
            _empty_kernel[(self.case.batch,)](self.codes)
            return self.codes
        return self.codes.detach()


SAMPLERS: tuple[type[Sampler], ...] = (
    Rowseed,
    RowseedPacked,
    OmniGenerators,
    OmniGenerator,
    OmniUniforms,
    OmniFilledUniforms,
    Multinomial,
    VllmV2,
    FlashInfer,
    SglangOmni,
    Floor,
)


def interpreted() -> bool:
    """Whether this is a dry run, in which Triton's interpreter runs the kernels (bench/sampler.py)."""
    return os.environ.get(DRY_RUN) == "1"


@contextlib.contextmanager
def quiet():
    """Keep what vLLM logs while it is imported out of a bench's output."""
    import logging

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def module_file(package: str, *path: str) -> str:
    """A file of an installed package, found without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise Unavailable(f"{package.replace('_', '-')} is not installed")
    return os.path.join(next(iter(spec.submodule_search_locations)), *path)


def load_alone(name: str, file: str, stand_ins: dict[str, types.ModuleType]) -> types.ModuleType:
    """Load one file of a package with stand-ins for the modules that it imports, and leave none behind."""
    saved = {key: sys.modules.get(key) for key in stand_ins}
    sys.modules.update(stand_ins)
    try:
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # triton.jit looks its function's module up
        spec.loader.exec_module(module)
        return module
    finally:
        for key, value in saved.items():
            if value is None:
                del sys.modules[key]
            else:
                sys.modules[key] = value


def module(name: str, **members) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__path__ = []
    made.__dict__.update(members)
    return made


def sglang_kernels() -> types.ModuleType:
    """sglang-omni's sampling_kernels.py, without its engine (which pins other versions of torch)."""
    if "rowseed_bench_sglang" not in sys.modules:
        file = module_file("sglang_omni", "models", "qwen3_tts", "sampling_kernels.py")
        platform = types.SimpleNamespace(is_npu=lambda: False)
        stand_ins = {
            "sglang_omni": module("sglang_omni"),
            "sglang_omni.platforms": module("sglang_omni.platforms", current_platform=platform),
        }
        load_alone("rowseed_bench_sglang", file, stand_ins)
    return sys.modules["rowseed_bench_sglang"]


def vllm_kernels(device: torch.device):
    """vLLM's gumbel module and its top-k/top-p filter, from the installed package."""
    if device.type == "cuda":
        with quiet():
            try:
                from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
                from vllm.v1.worker.gpu.sample import gumbel
            except ImportError as error:
                raise Unavailable(f"vllm cannot be imported: {error}") from error
        return gumbel, apply_top_k_top_p
    if not interpreted():
        raise Unavailable("its kernels are Triton's: they need a GPU, or the interpreter (--dry-run)")
    # On a CPU vLLM turns Triton off at import; its two kernels' file runs alone.
    if "rowseed_bench_gumbel" not in sys.modules:
        libdevice = types.SimpleNamespace(log1p=_log1p)
        utilities = module("vllm.triton_utils", HAS_TRITON=True, tl=tl, triton=triton, tldevice=libdevice)
        stand_ins = {"vllm": module("vllm"), "vllm.triton_utils": utilities}
        load_alone(
            "rowseed_bench_gumbel",
            module_file("vllm", "v1", "worker", "gpu", "sample", "gumbel.py"),
            stand_ins,
        )
    with quiet():
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
    return sys.modules["rowseed_bench_gumbel"], apply_top_k_top_p_pytorch
