"""The draws follow softmax after the filters; every statistic comes with a sampler that it rejects.

Seeds are fixed, so that a test passes or fails for good. A statistic accepts with p > ACCEPT and its
counterexample has p < REJECT; the backends' bits are equal (``test_sampling.py``), so torch draws here.
"""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from rowseed.kernels import noise
from rowseed.kernels.philox import philox4x32
from rowseed.kernels.sampling import sample

ACCEPT, REJECT = 1e-3, 1e-9
DRAWS = 40_000
V = 24


@pytest.fixture(scope="module")
def logits():
    return torch.randn(V, generator=torch.Generator().manual_seed(11)) * 1.5


def steps(draws=DRAWS, seed=5, first=0):
    """Streams of one seed at consecutive offsets."""
    lines = torch.zeros(draws + 1, 3, dtype=torch.int64)
    lines[0, 2] = draws
    lines[1:, 0] = seed
    lines[1:, 1] = torch.arange(first, first + draws)
    lines[1:, 2] = 1
    return lines


def seeds(draws=DRAWS):
    """Streams of consecutive seeds at one offset."""
    lines = steps(draws)
    lines[1:, 0], lines[1:, 1] = torch.arange(draws), 7
    return lines


def unseeded(draws=DRAWS):
    lines = steps(draws)
    lines[1:, 2] = 0
    lines[0, :2] = torch.tensor([99, 12345])
    return lines


def draw(logits, lines, **kwargs):
    return sample(logits.expand(len(lines) - 1, -1), lines, **kwargs).numpy()


def fit(codes, probabilities):
    """p-value of the codes' counts; a code that cannot be drawn gives 0."""
    counts = np.bincount(codes, minlength=len(probabilities))
    possible = probabilities > 0
    if counts[~possible].any():
        return 0.0
    return stats.chisquare(counts[possible], probabilities[possible] * len(codes)).pvalue


def filtered_softmax(logits, temperature=1.0, top_k=0, top_p=1.0):
    """float64 probabilities, by the book: temperature, top-k, softmax, top-p, renormalise."""
    scaled = logits.double().numpy() / temperature
    order = np.argsort(-scaled)
    if top_k:
        scaled[order[top_k:]] = -np.inf
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    return p / p.sum()


FILTERS = [
    dict(),
    dict(temperature=0.7),
    dict(temperature=1.9),
    dict(top_k=6),
    dict(top_p=0.8),
    dict(temperature=0.9, top_k=10, top_p=0.85),
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("addresses", [steps, seeds, unseeded])
def test_codes_follow_the_filtered_softmax(logits, addresses, filters):
    assert fit(draw(logits, addresses(), codebook=2, **filters), filtered_softmax(logits, **filters)) > ACCEPT


@pytest.mark.parametrize("filters", FILTERS[1:], ids=str)
def test_the_fit_rejects_codes_drawn_without_the_filters(logits, filters):
    assert fit(draw(logits, steps()), filtered_softmax(logits, **filters)) < REJECT


def test_the_fit_rejects_probabilities_in_place_of_logits(logits):
    assert fit(draw(logits.softmax(-1), steps()), filtered_softmax(logits)) < REJECT


def rate_at_gap(gap, gumbel, words=2**18):
    """Exact rate of a token `gap` nats below another, as a share of the right one, for a noise function.

    Sums over the low words of the rare token, which hold all but a 1e-12 part of its chances, the share
    of the other token's words that lose to it, found by bisection: noise never increases with the word.
    """
    t = torch.tensor(-gap, dtype=torch.float32) * torch.tensor(noise.LOG2E, dtype=torch.float32)
    reached = t + gumbel(torch.arange(words))
    low, high = torch.zeros(words, dtype=torch.int64), torch.full((words,), 2**32)
    for _ in range(33):  # the first word whose noise is below `reached`
        middle = (low + high) >> 1
        loses = gumbel(middle.clamp_max(2**32 - 1)) < reached
        high = torch.where(loses, middle, high)
        low = torch.where(loses, low, (middle + 1).clamp_max(high))
    rate = (2**32 - high.double()).sum().item() / 2.0**64
    return rate * (1 + math.exp(gap))


def coarse_gumbel(words):
    """Gumbel noise -log(-log(u)) from uniforms k / 2**24, the common recipe, without other rounding."""
    u = ((words ^ 0xFFFFFFFF) >> 8).double() / 2.0**24
    return -torch.log2(-torch.log2(u)).float()


@pytest.mark.parametrize(("gap", "tolerance"), [(12, 1e-3), (16, 1e-3), (18, 1e-3), (20, 2e-3)])
def test_tail_rates_are_right(gap, tolerance):
    assert rate_at_gap(gap, noise.gumbel) == pytest.approx(1, abs=tolerance)


@pytest.mark.parametrize("gap", [16, 18, 20])
def test_the_tail_rejects_coarse_uniforms(gap):
    assert abs(rate_at_gap(gap, coarse_gumbel) - 1) > 0.1


def test_a_constant_added_to_the_logits_changes_nothing():
    grid = torch.randint(-1024, 1024, (512,), generator=torch.Generator().manual_seed(3)) / 256
    lines = steps(2000)
    for filters in (dict(temperature=0.9), dict(temperature=0.9, top_k=50, top_p=0.9)):
        codes = draw(grid, lines, **filters)
        for constant in (1024.0, -3.0, 0.00390625):
            assert np.array_equal(draw(grid + constant, lines, **filters), codes)
        # The counterexample: a constant that float32 cannot add exactly.
        assert not np.array_equal(draw(grid + 1e6 / 3, lines, **filters), codes)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_a_masked_token_is_never_drawn(logits, filters):
    masked = logits.repeat(4)
    forbidden = torch.arange(4 * V) % 3 == 0
    masked[forbidden] = -math.inf
    masked[0], masked[3] = math.nan, -math.inf
    codes = draw(masked, steps(), **filters)
    assert not forbidden[codes].any()
    assert forbidden[draw(torch.where(forbidden, -1.0, masked), steps())].any()


def dependence(a, b):
    """p-value of two lists of codes being independent of each other."""
    table = np.zeros((V, V))
    np.add.at(table, (a, b), 1)
    table = table[table.sum(1) > 200][:, table.sum(0) > 200]
    return stats.chi2_contingency(table).pvalue


def test_steps_seeds_and_codebooks_are_independent(logits):
    flat = logits * 0.3
    step = draw(flat, steps(), codebook=3)
    others = {
        "next step": draw(flat, steps(first=1), codebook=3),
        "a step 2**32 on": draw(flat, steps(first=2**32), codebook=3),
        "next codebook": draw(flat, steps(), codebook=4),
        "next seed": draw(flat, steps(seed=6), codebook=3),
        "a seed 2**32 on": draw(flat, steps(seed=5 + 2**32), codebook=3),
        "unseeded": draw(flat, unseeded(), codebook=3),
    }
    for name, codes in others.items():
        assert dependence(step, codes) > ACCEPT, name
    along = draw(flat, seeds(), codebook=3)
    assert dependence(along[:-1], along[1:]) > ACCEPT
    assert dependence(step[:-1], step[1:]) > ACCEPT


def test_independence_rejects_one_noise_vector_for_all_codebooks(logits):
    """Two codebooks of different logits that share their noise."""
    a = draw(logits * 0.3, steps(), codebook=3)
    b = draw(logits.flip(0) * 0.3, steps(), codebook=3)
    assert dependence(a, b) < REJECT


def correlation_z(a, b):
    """Standard errors that the correlation of two noise vectors is from 0."""
    return abs(np.corrcoef(a, b)[0, 1]) * math.sqrt(len(a))


def test_lanes_and_neighbouring_tokens_are_independent():
    blocks, zero = torch.arange(200_000), torch.zeros(1, dtype=torch.int64)
    lanes = philox4x32((zero, zero, blocks, zero + (1 << 24)), (zero + 42, zero))
    lanes = [noise.gumbel(lane).numpy() for lane in lanes]
    for i in range(4):
        assert correlation_z(lanes[i][:-1], lanes[i][1:]) < 4.5
        for j in range(i):
            assert correlation_z(lanes[i], lanes[j]) < 4.5
    # The counterexample: one word of sixteen bits for each of two lanes.
    halves = philox4x32((zero, zero, blocks, zero), (zero, zero))[0]
    shared = [noise.gumbel(halves).numpy(), noise.gumbel((halves >> 8) << 8).numpy()]
    assert correlation_z(*shared) > 100
