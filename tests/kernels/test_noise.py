"""The noise and the masses: golden bits, edges, monotone, close to float64, equal on the device."""

import json
from pathlib import Path

import device_functions
import numba
import numpy as np
import oracle
import pytest
import torch
from backends import on_device

from rowseed.kernels import cpu, noise

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden_scheme1.json").read_text())
ABSOLUTE_ERROR = 1.3e-6
"""Largest error of the noise over all 2**32 words."""

EDGES = [0, 1, 2, 3, 65535, 65536, 2**24 - 1, 2**24, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
EDGES += [noise.SMALL_WORDS + d for d in (-2, -1, 0, 1)]
EDGES += [(2**32 - 1) ^ w for w in (2, 65535, 65536, 2**24 - 1, 2**24)]


@pytest.fixture(scope="module")
def words():
    """The edge words and a million random ones, ascending."""
    random = torch.randint(0, 2**32, (1_000_000,), generator=torch.Generator().manual_seed(1))
    return torch.cat([torch.tensor(EDGES), random]).sort().values


def by_numba(function, given, returned):
    """One of ``cpu``'s functions of a number as a function of a tensor."""

    @numba.njit
    def each(values, results):
        for i in range(len(values)):
            results[i] = function(values[i])

    def call(values):
        results = np.empty(len(values), returned)
        each(values.numpy().astype(given), results)
        return torch.from_numpy(results)

    return call


@pytest.fixture(params=["torch", "numba", "triton"])
def functions(request):
    """(gumbel, mass) of one backend."""
    if request.param == "torch":
        return noise.gumbel, noise.mass
    if request.param == "numba":
        return by_numba(cpu._gumbel, np.uint64, np.float32), by_numba(cpu._mass, np.float32, np.int64)
    return on_device(device_functions.gumbel), on_device(device_functions.mass)


def bits(x):
    return x.view(torch.int32)


def test_golden_noise(functions):
    drawn = functions[0](torch.tensor([word for word, _ in GOLDEN["noise"]]))
    assert [f"{b & 0xFFFFFFFF:08x}" for b in bits(drawn).tolist()] == [g for _, g in GOLDEN["noise"]]


def test_golden_masses(functions):
    t = torch.tensor([t for t, _ in GOLDEN["weight"]], dtype=torch.float32)
    assert functions[1](t).tolist() == [w for _, w in GOLDEN["weight"]]


def test_noise_is_finite_monotone_and_close(words):
    drawn = noise.gumbel(words)
    assert drawn.isfinite().all()
    assert (drawn.diff() <= 0).all()
    error = np.abs(drawn.numpy().astype(np.float64) - oracle.exact_gumbel(words.numpy()))
    assert error.max() < ABSOLUTE_ERROR
    assert drawn[0] == pytest.approx(32.471233, abs=1e-6)
    assert drawn[-1] == pytest.approx(-5.044394, abs=1e-6)


def test_a_fused_multiply_add_would_be_seen(monkeypatch):
    """The golden words reject polynomials whose steps round once instead of twice."""

    def fused(s, coefficients):
        p = torch.full_like(s, coefficients[-1])
        for c in coefficients[-2::-1]:
            p = (p.double() * s.double() + c).float()
        return p

    golden = torch.tensor([word for word, _ in GOLDEN["noise"]])
    right = bits(noise.gumbel(golden))
    monkeypatch.setattr(noise, "_horner", fused)
    assert (bits(noise.gumbel(golden)) != right).any()


def test_million_words_equal_on_every_backend(words, functions):
    expected = oracle.gumbel(words.numpy().astype(np.uint32))
    assert np.array_equal(functions[0](words).numpy().view(np.int32), expected.view(np.int32))


def test_masses_equal_on_every_backend(functions):
    t = -torch.rand(4000, generator=torch.Generator().manual_seed(2)) * 34
    t = torch.cat([t, torch.tensor([0.0, -0.0, -1e-10, -1e-38, -30.999998, -31.0, -64.0, -3.4028235e38])])
    assert functions[1](t).tolist() == oracle.mass(t.numpy())


def test_mass_is_proportional_to_two_to_the_t():
    t = -torch.arange(0, 31, 0.01)
    exact = np.exp2(t.numpy().astype(np.float64)) * 2**30
    assert (np.abs(noise.mass(t).numpy() - exact) < 1 + 1e-6 * exact).all()
