"""What users of seeded samplers have reported elsewhere: one test a report, each with the right value.

The reports that need the runners are in ``tests/lifecycle``, those that need the entry points in
``test_bad_requests.py``. The kernel runs in Triton's interpreter where there is no GPU, hence small sizes.
"""

import math

import numpy as np
import pytest
import torch

from rowseed.kernels import fused, noise
from rowseed.kernels.sampling import sample
from rowseed.kernels.streams import INACTIVE, SEEDED, RowParameters, RowStreams, check_seed

GLOBAL_SEED = 77
NAN, INF = math.nan, math.inf
NAN_MET, INF_MET, NOTHING_ALIVE, BAD_PARAMETER = 1, 2, 4, 8

Z_TOLERANCE = 5.0
"""Standard errors that a frequency may be off: one false alarm in about two million."""


@pytest.fixture(params=["torch", "numba", "triton"])
def backend(request):
    if request.param == "triton" and not fused.INTERPRETED and not torch.cuda.is_available():
        pytest.skip("the Triton interpreter is off and there is no GPU")
    return request.param


@pytest.fixture
def device(backend):
    return torch.device("cuda" if backend == "triton" and torch.cuda.is_available() else "cpu")


def streams_of(seeds, offsets=None, device="cpu"):
    """Lines of a batch; unseeded rows use GLOBAL_SEED from offset 0 on."""
    offsets = [0] * len(seeds) if offsets is None else offsets
    return RowStreams(len(seeds), device, global_seed=GLOBAL_SEED).pack(seeds, offsets)


def some_logits(rows, vocabulary=97, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator).mul(2).to(device)


def same_row(rows, vocabulary=97, seed=0, device="cpu"):
    return some_logits(1, vocabulary, seed, device).expand(rows, vocabulary)


class TestReplayFollowsTheTensors:
    """A graph captured at temperature .9 and one offset, replayed at .1 and another."""

    ROWS = 3

    def _eager(self, logits, temperature, offset, backend, device):
        streams = streams_of([5, None, 7], [offset] * self.ROWS, device)
        return sample(
            logits, streams, temperature=temperature, top_k=20, codebook=3, backend=backend
        ).tolist()

    def _recorded(self, device):
        streams = RowStreams(self.ROWS, device, global_seed=GLOBAL_SEED)
        parameters = RowParameters(self.ROWS, device, temperature=0.9, top_k=20)

        def step(logits, backend):
            return sample(
                logits,
                streams.tensor,
                temperature=parameters.temperature,
                top_k=parameters.top_k,
                top_p=parameters.top_p,
                codebook=3,
                backend=backend,
            )

        return streams, parameters, step

    def _set(self, streams, parameters, temperature, offset):
        streams.global_offset = 0
        streams.pack([5, None, 7], [offset] * self.ROWS)
        parameters.pack([temperature] * self.ROWS, [20] * self.ROWS, [1.0] * self.ROWS)

    def test_replay_equals_eager_with_the_new_values(self, backend, device):
        from torch.fx.experimental.proxy_tensor import make_fx

        logits = some_logits(self.ROWS, device=device)
        streams, parameters, step = self._recorded(device)
        self._set(streams, parameters, 0.9, 4)
        # A trace bakes in every host value that the call reads, as a graph capture does.
        replay = make_fx(lambda x: step(x, backend))(logits)
        first = replay(logits).tolist()
        self._set(streams, parameters, 0.1, 9)
        second = replay(logits).tolist()
        assert first == self._eager(logits, 0.9, 4, backend, device)
        assert second == self._eager(logits, 0.1, 9, backend, device)
        assert first != second

    @pytest.mark.gpu
    def test_cuda_graph_replay_equals_eager_with_the_new_values(self):
        device = torch.device("cuda")
        logits = some_logits(self.ROWS, device=device)
        streams, parameters, step = self._recorded(device)
        self._set(streams, parameters, 0.9, 4)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step(logits, "triton")
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            codes = step(logits, "triton")
        graph.replay()
        assert codes.tolist() == self._eager(logits, 0.9, 4, "triton", device)
        self._set(streams, parameters, 0.1, 9)
        graph.replay()
        assert codes.tolist() == self._eager(logits, 0.1, 9, "triton", device)


class TestEveryRowHasItsOwnSeed:
    """Seeds [a, b, c, d] against [a, a, a, a]; rows permuted."""

    SEEDS = (11, 12, 13, 14)

    def _codes(self, logits, seeds, backend, offset):
        return sample(logits, streams_of(seeds, [offset] * 4, logits.device), backend=backend).tolist()

    def test_row_i_uses_seed_i(self, backend, device):
        logits = same_row(4, device=device)
        for offset in range(3):
            mixed = self._codes(logits, self.SEEDS, backend, offset)
            for row, seed in enumerate(self.SEEDS):
                alone = self._codes(logits, [seed] * 4, backend, offset)
                assert alone == [mixed[row]] * 4
            assert len(set(mixed)) > 1

    def test_permuted_rows_give_permuted_codes(self, backend, device):
        logits = some_logits(4, device=device)
        order = [2, 0, 3, 1]
        codes = self._codes(logits, self.SEEDS, backend, 6)
        permuted = self._codes(logits[order], [self.SEEDS[i] for i in order], backend, 6)
        assert permuted == [codes[i] for i in order]
        assert codes != permuted


class TestOneBadSeedAmongGood:
    """The streams refuse it by name and stay as they were. Entry points: ``test_bad_requests.py``."""

    @pytest.mark.parametrize(
        "seed", [-(2**63) - 1, 2**64, 10**20, "42", "abc", 4.2, 4.0, True, NAN], ids=repr
    )
    def test_refused_by_name_and_nothing_changes(self, seed):
        streams = RowStreams(3, "cpu", global_seed=GLOBAL_SEED)
        before = streams.pack([1, None, 3], [4, 5, 6]).clone()
        offset = streams.global_offset
        with pytest.raises((TypeError, ValueError), match=r"seed.*\[-2\*\*63, 2\*\*64\)"):
            check_seed(seed)
        with pytest.raises((TypeError, ValueError), match=r"seeds\[1\]"):
            streams.pack([1, seed, 3], [7, 8, 9])
        assert torch.equal(streams.tensor, before)
        assert streams.global_offset == offset

    @pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1, 2**63, 2**64 - 1])
    def test_every_64_bit_seed_is_good(self, seed):
        line = RowStreams(1, "cpu", global_seed=0).pack([seed], [0])[1].tolist()
        assert line[0] % 2**64 == seed % 2**64
        assert line[2] == SEEDED


def test_seed_zero_is_a_seed_and_no_seed_is_none(backend, device):
    """Seed 0 twice, then none, none: 0 repeats itself, the others repeat nothing."""
    logits = same_row(15, 64, device=device).view(1, 15, 64)
    streams = RowStreams(1, device, global_seed=0)

    def frame(seed):
        return sample(logits, streams.pack([seed], [0]), backend=backend, codebook=1).tolist()

    zero, again, none, other = frame(0), frame(0), frame(None), frame(None)
    assert zero == again
    assert none != zero
    assert other != zero
    assert none != other


def test_six_frames_then_rebuilt_and_four_more_continue_the_stream(backend, device):
    """Ten frames straight, against six, the state dropped, rebuilt at frame 6, and four more."""
    logits = some_logits(10, 64, device=device)

    def frames(streams, indices):
        return [
            sample(logits[i : i + 1], streams.pack([2024], [i]), top_k=20, backend=backend).item()
            for i in indices
        ]

    straight = frames(RowStreams(1, device), range(10))
    first = frames(RowStreams(1, device), range(6))
    rest = frames(RowStreams(1, device, global_seed=99), range(6, 10))
    assert first + rest == straight
    restarted = frames(RowStreams(1, device), [0, 1, 2, 3])
    assert restarted != straight[6:]


class TestBadLogitsInTheMiddleRow:
    """NaN everywhere, one NaN, +inf, all -inf: id in range, status set, neighbours bit-equal, no assert."""

    ROWS = (
        ("all NaN", lambda row: row.fill_(NAN), NAN_MET | NOTHING_ALIVE),
        ("one NaN", lambda row: row[3].fill_(NAN), NAN_MET),
        ("+inf", lambda row: row[5].fill_(INF), INF_MET),
        ("all -inf", lambda row: row.fill_(-INF), NOTHING_ALIVE),
    )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize(("spoil", "flags"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
    def test_only_that_row_is_touched(self, spoil, flags, dtype, backend, device):
        vocabulary = 61
        logits = some_logits(3, vocabulary, device=device).to(dtype)
        streams = streams_of([1, None, 3], [4, 4, 4], device)

        def run(x):
            status = torch.full((3,), -7, dtype=torch.int32, device=device)
            codes = sample(x, streams, top_k=50, top_p=0.9, temperature=0.9, status=status, backend=backend)
            return codes.tolist(), status.tolist()

        clean, clean_status = run(logits)
        spoilt = logits.clone()
        spoil(spoilt[1])
        codes, status = run(spoilt)
        assert clean_status == [0, 0, 0]
        assert status == [0, flags, 0]
        assert [codes[0], codes[2]] == [clean[0], clean[2]]
        assert 0 <= codes[1] < vocabulary
        assert not math.isnan(spoilt[1, codes[1]]) or flags & NOTHING_ALIVE


class TestParametersOutOfRange:
    """Temperature NaN, inf, -1; top_p NaN, -0.1, 1.5; top_k 2.5, True."""

    BAD = (
        [("temperature", value) for value in (NAN, INF, -1.0, -1e-9, True, "1")]
        + [("top_p", value) for value in (NAN, -0.1, 1.5, True)]
        + [("top_k", value) for value in (2.5, True, "5")]
    )

    @pytest.mark.parametrize(("name", "value"), BAD)
    def test_refused_on_the_host_before_launch(self, name, value, backend, device):
        out = torch.full((2,), -7, device=device)
        with pytest.raises((TypeError, ValueError), match=name):
            sample(some_logits(2, device=device), streams_of([1, 2], device=device), out=out, backend=backend,
                   **{name: value})  # fmt: skip
        assert out.tolist() == [-7, -7]
        parameters = RowParameters(2, "cpu")
        before = parameters.temperature.tolist(), parameters.top_k.tolist(), parameters.top_p.tolist()
        values = {"temperature": [0.5, 0.5], "top_k": [1, 1], "top_p": [0.5, 0.5]}
        values[name][1] = value
        with pytest.raises((TypeError, ValueError), match=name):
            parameters.pack(**values)
        assert (
            parameters.temperature.tolist(),
            parameters.top_k.tolist(),
            parameters.top_p.tolist(),
        ) == before

    def test_on_the_device_flagged_and_greedy(self, backend, device):
        temperatures = [NAN, INF, -1.0, 1.0, 1.0, 1.0, 1.0]
        top_ps = [1.0, 1.0, 1.0, NAN, -0.1, 1.5, 0.9]
        rows = len(temperatures)
        logits = some_logits(rows, device=device)
        status = torch.full((rows,), -7, dtype=torch.int32, device=device)
        codes = sample(
            logits,
            streams_of(range(rows), device=device),
            temperature=torch.tensor(temperatures, device=device),
            top_p=torch.tensor(top_ps, device=device),
            status=status,
            backend=backend,
        )
        assert status.tolist() == [BAD_PARAMETER] * (rows - 1) + [0]
        assert codes[:-1].tolist() == logits[:-1].argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_tiny_temperatures_mixed_in_one_batch(dtype, backend, device):
    """0, 1e-12 and 9.9e-6 are greedy, 1e-5 and 1e-4 sampled; half of the tokens masked with -inf."""
    temperatures = torch.tensor([0.0, 1e-12, 9.9e-6, 1e-5, 1e-4], device=device)
    rows, vocabulary = len(temperatures), 64
    logits = some_logits(rows, vocabulary, device=device).mul(1e3).to(dtype)
    logits[:, ::2] = -INF
    # Two live tokens share the largest value: a greedy row takes the lower, a sampled one takes turns.
    first, second = 21, 43
    logits[:, [first, second]] = logits.amax(-1, keepdim=True)
    seen = []
    for offset in range(8):
        status = torch.full((rows,), -7, dtype=torch.int32, device=device)
        streams = streams_of(range(rows), [offset] * rows, device)
        codes = sample(logits, streams, temperature=temperatures, top_k=50, status=status, backend=backend)
        assert status.tolist() == [0] * rows
        seen.append(codes.tolist())
    best = logits[0].argmax().item()
    per_row = [set(codes) for codes in zip(*seen, strict=True)]
    assert per_row[:3] == [{logits[row].float().argmax().item()} for row in range(3)]
    assert best == min(first, (logits[0] == logits[0, first]).nonzero().min().item())
    for row in (3, 4):
        ties = (logits[row] == logits[row, first]).nonzero().flatten().tolist()
        assert per_row[row] == set(ties)


def test_every_top_k_in_one_batch(backend, device):
    """top_k 0, -1, None (its number, 0), 1, V, V + 1 and 50 in one batch, and each of them as a number."""
    vocabulary = 64
    values = [0, -1, 1, vocabulary, vocabulary + 1, 50]
    logits = same_row(len(values), vocabulary, device=device).mul(0.05)
    ranks = logits[0].argsort(descending=True).argsort()
    largest_rank = [0] * len(values)
    for offset in range(4):
        streams = streams_of([6] * len(values), [offset] * len(values), device)
        codes = sample(logits, streams, top_k=torch.tensor(values, device=device), backend=backend)
        off = codes[0].item()
        assert [codes[i].item() for i in (1, 3, 4)] == [off] * 3
        assert ranks[codes[2]] == 0
        assert ranks[codes[5]] < 50
        largest_rank = [max(largest_rank[i], ranks[code].item()) for i, code in enumerate(codes)]
        if offset == 0:
            for value, code in zip([*values, None], [*codes.tolist(), off], strict=True):
                alone = sample(logits[:1], streams_of([6], [offset], device), top_k=value, backend=backend)
                assert alone.tolist() == [code]
    assert largest_rank[0] >= 50  # so that "off" and 50 were told apart


def test_bfloat16_ties_at_the_kth_value_are_one_set_at_batch_1_and_8(backend, device):
    """k = 3 of [9, 8, 7, 7, 7, 0, ...]: all three sevens stay, whatever the batch."""
    logits = torch.tensor([7.0, 0, 9, 7, 8, 7, 0, -1, 6], device=device).mul(0.03125).bfloat16()
    tied = {0, 2, 3, 4, 5}
    draws = 40
    small, large = [], []
    for start in range(0, draws, 8):
        streams = streams_of([6] * 8, range(start, start + 8), device)
        large += sample(logits.expand(8, -1), streams, top_k=3, backend=backend).tolist()
    for offset in range(0, draws, 4):
        small += sample(logits[None], streams_of([6], [offset], device), top_k=3, backend=backend).tolist()
    assert set(large) == tied
    assert small == large[::4]


def _chi_square(codes, vocabulary):
    """Pearson's statistic of uniformity, in standard deviations from its mean (Wilson-Hilferty)."""
    counts = np.bincount(codes, minlength=vocabulary)
    expected = len(codes) / vocabulary
    degrees = vocabulary - 1
    statistic = ((counts - expected) ** 2).sum() / expected
    return ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))


class TestStepsAndCodebooksAreIndependent:
    """64 steps of flat logits in one row; the same logits at all 15 codebooks."""

    STEPS, VOCABULARY, ROWS = 64, 64, 100

    def _codes(self, offset_of):
        logits = torch.zeros(1, self.VOCABULARY).expand(self.ROWS, -1)
        steps = [
            sample(logits, streams_of(range(self.ROWS), [offset_of(step)] * self.ROWS)).numpy()
            for step in range(self.STEPS)
        ]
        return np.stack(steps, 1)  # [ROWS, STEPS]

    def _looks_uniform(self, codes):
        """Each row's 64 steps: the number of distinct codes; and all codes together: chi-square."""
        distinct = np.array([len(set(row)) for row in codes])
        p_missed = (1 - 1 / self.VOCABULARY) ** self.STEPS
        p_both_missed = (1 - 2 / self.VOCABULARY) ** self.STEPS
        mean = self.VOCABULARY * (1 - p_missed)
        variance = self.VOCABULARY * (p_missed - p_missed**2) + self.VOCABULARY * (self.VOCABULARY - 1) * (
            p_both_missed - p_missed**2
        )
        z = (distinct.mean() - mean) / math.sqrt(variance / len(codes))
        return abs(z) < Z_TOLERANCE and abs(_chi_square(codes.ravel(), self.VOCABULARY)) < Z_TOLERANCE

    def test_flat_logits_are_uniform_over_the_steps(self):
        assert self._looks_uniform(self._codes(lambda step: step))

    def test_the_check_rejects_an_offset_that_advances_every_other_step(self):
        assert not self._looks_uniform(self._codes(lambda step: step // 2))

    def _disagreement(self, codebook_of):
        """How far the rate of agreement is from sum(p^2), of any pair and overall, in standard errors."""
        logits = some_logits(1, self.VOCABULARY).expand(self.ROWS, -1)
        codes = [
            sample(logits, streams_of(range(self.ROWS)), codebook=codebook_of(c)).numpy()
            for c in range(1, 16)
        ]
        pairs = np.array([(a == b).mean() for i, a in enumerate(codes) for b in codes[:i]])
        p = torch.softmax(logits[0].double(), -1).numpy()
        expected = (p**2).sum()
        variance = expected * (1 - expected)
        # Two pairs with a codebook in common are correlated unless p is flat; each pair has 26 such partners.
        covariance = (p**3).sum() - expected**2
        of_mean = (variance + 26 * covariance) / len(pairs)
        z_pairs = (pairs - expected) / math.sqrt(variance / self.ROWS)
        z_mean = (pairs.mean() - expected) / math.sqrt(of_mean / self.ROWS)
        return max(abs(z_pairs).max(), abs(z_mean))

    def test_codebooks_agree_as_often_as_independent_draws(self):
        assert self._disagreement(lambda c: c) < Z_TOLERANCE

    def test_the_check_rejects_two_codebooks_that_share_a_stream(self):
        assert self._disagreement(lambda c: 1 if c == 2 else c) > Z_TOLERANCE


def test_draws_from_torchs_global_generator_change_nothing(backend, device):
    logits = some_logits(2, device=device)

    def steps(between):
        torch.manual_seed(0)
        streams = RowStreams(2, device, global_seed=GLOBAL_SEED)
        codes = []
        for offset in range(3):
            codes += sample(logits, streams.pack([8, None], [offset, offset]), backend=backend).tolist()
            between()
        return codes

    with torch.random.fork_rng():
        untouched = steps(lambda: None)
        assert torch.equal(torch.random.get_rng_state(), torch.manual_seed(0).get_state())
        assert steps(lambda: torch.rand(1000)) == untouched


class TestADeadTokenIsNeverDrawn:
    @pytest.mark.parametrize(("rest", "draws"), [(-INF, 10**6), (-60.0, 10**5)])
    def test_one_hot_row_a_million_draws(self, rest, draws):
        """A gap of 60 is 86 in base 2, and the noise spans 37.6: even the finite rest is never drawn."""
        rows, live = 50_000, 5
        logits = torch.full((1, 8), rest)
        logits[0, live] = 0.0
        streams = RowStreams(rows, "cpu", global_seed=GLOBAL_SEED)
        seeds = [None] * rows
        for _ in range(draws // rows):
            codes = sample(logits.expand(rows, -1), streams.pack(seeds, np.zeros(rows, np.int64)))
            assert (codes == live).all()
        assert streams.global_offset == draws

    @pytest.mark.parametrize("top_p", [1.0, 0.9])
    def test_rows_mostly_dead_with_k_above_the_live_ones(self, top_p, backend, device):
        vocabulary, live = 64, {7, 30, 31}
        logits = torch.full((8, vocabulary), -INF, device=device)
        logits[:, sorted(live)] = 0.0
        seen = set()
        for offset in range(4):
            streams = streams_of(range(8), [offset] * 8, device)
            seen |= set(sample(logits, streams, top_k=50, top_p=top_p, backend=backend).tolist())
        assert seen == live


class TestLargeOffsetsAndAddresses:
    OFFSETS = (2**31 - 1, 2**31, 2**32, 2**32 + 2**31, 2**63 - 1, -1)

    def test_offsets_beyond_32_bits(self, backend, device):
        """Both words of the offset count, in every backend alike; golden values are in ``tests/kernels``."""
        logits = torch.zeros(1, 5, 64, device=device)
        frames = {}
        for offset in (0, *self.OFFSETS):
            streams = streams_of([9], [offset], device)
            frames[offset] = tuple(sample(logits, streams, backend=backend)[0].tolist())
            assert list(frames[offset]) == sample(logits.cpu(), streams.cpu(), backend="torch")[0].tolist()
        assert len(set(frames.values())) == len(frames)

    def test_row_times_stride_beyond_two_to_the_31(self, backend, device):
        if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 6 * 2**30:
            pytest.skip("needs 6 GiB of free GPU memory")
        vocabulary, stride = 64, 2**30 + 8
        # Untouched pages of an empty CPU tensor take no memory.
        storage = torch.empty(2 * stride + vocabulary, dtype=torch.bfloat16, device=device)
        logits = storage.as_strided((3, vocabulary), (stride, 1))
        logits.copy_(some_logits(3, vocabulary, device=device))
        assert logits.storage_offset() + 2 * logits.stride(0) > 2**31
        streams = streams_of([1, 2, 3], device=device)
        codes = sample(logits, streams, top_k=20, backend=backend)
        assert codes.tolist() == sample(logits.clone(), streams, top_k=20, backend=backend).tolist()


@pytest.mark.gpu
def test_no_compilation_after_the_warm_up():
    """Batches of 1, 15, 16, 17 and 255. Without a GPU: ``tests/kernels/compiled_fused.py``."""
    device = torch.device("cuda")

    def run(rows):
        logits = torch.zeros(rows, 2048, dtype=torch.bfloat16, device=device)
        sample(logits, streams_of([1] * rows, device=device), top_k=50, temperature=0.9)

    run(2)
    kernels = fused._sample_kernel.device_caches[torch.cuda.current_device()][0]
    compiled = len(kernels)
    for rows in (1, 15, 16, 17, 255):
        run(rows)
    assert len(kernels) == compiled > 0


def test_the_smallest_and_largest_noise_are_finite_and_on_the_right_side():
    """The ends of the word range, where other samplers gave inf or NaN (log of 0)."""
    ends = noise.gumbel(torch.tensor([0, 2**32 - 1]))
    assert ends.isfinite().all()
    assert ends[0] > 32 and ends[1] < -5


def test_inactive_rows_read_nothing(backend, device):
    """Padding lines may hold anything: their logits are not read and their code is 0."""
    logits = some_logits(3, device=device)
    logits[1] = NAN
    streams = streams_of([1, 2, 3], device=device)
    expected = sample(logits, streams, backend=backend).tolist()
    streams[2] = torch.tensor([-1, -1, INACTIVE])
    status = torch.full((3,), -7, dtype=torch.int32, device=device)
    codes = sample(logits, streams, status=status, backend=backend)
    assert codes.tolist() == [expected[0], 0, expected[2]]
    assert status.tolist() == [0, -7, 0]
