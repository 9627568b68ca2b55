"""The gate lets right codes through and stops wrong ones, and no speed is kept for what it stops.

Each wrong sampler here is one that timing alone would not notice. 4,096 draws from 64 rows; the gate's
chi-square limit is the upper 1e-6 point, so a right sampler fails once in a million seeds (these are fixed).
"""

import pytest
import torch
from gate import Expected, WrongError
from peers import Case, Multinomial, OmniUniforms, Rowseed
from rich.console import Console
from sampler import Bench
from timing import HostClock, PretendedClock

ROWS, VOCAB, TOP_K = 64, 512, 50


@pytest.fixture(scope="module")
def logits():
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0)) * 2


def draws(logits, *, temperature=0.9, top_k=TOP_K, top_p=1.0, times=64):
    """[times, B] codes by torch.multinomial over sorted probabilities."""
    values, tokens = logits.sort(dim=1, descending=True)
    p = (values.double() / temperature).softmax(1)
    p[:, top_k:] = 0
    p /= p.sum(1, keepdim=True)
    p[(p.cumsum(1) - p) >= top_p] = 0
    picked = torch.multinomial(p, times, replacement=True, generator=torch.Generator().manual_seed(1))
    return tokens.gather(1, picked).T


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_right_draws_pass(logits, top_p):
    Expected(logits, 0.9, TOP_K, top_p).check(draws(logits, top_p=top_p))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        pytest.param({"temperature": 1.1}, "do not follow", id="temperature"),
        pytest.param({"top_k": 25}, "do not follow", id="top-k-too-small"),
        pytest.param({"top_k": 80}, "not kept", id="top-k-too-large"),
        pytest.param({"top_p": 1.0}, "not kept", id="top-p-ignored"),
        pytest.param({"top_p": 0.6}, "do not follow", id="top-p-too-small"),
    ],
)
def test_wrong_draws_are_stopped(logits, wrong, message):
    top_p = 0.9 if "top_p" in wrong else 1.0
    with pytest.raises(WrongError, match=message):
        Expected(logits, 0.9, TOP_K, top_p).check(draws(logits, **{"top_p": top_p, **wrong}))


def test_greedy_and_out_of_range_codes_are_stopped(logits):
    expected = Expected(logits, 0.9, TOP_K, 1.0)
    with pytest.raises(WrongError, match="do not follow"):
        expected.check(logits.argmax(1).expand(64, ROWS))
    with pytest.raises(WrongError, match=f"code {VOCAB} is not in"):
        expected.ranks(torch.full((ROWS,), VOCAB))


def test_tied_values_stay_together():
    # Four equal tokens behind one large one: top-k 2 keeps all four, and top-p .9 cannot split them.
    row = torch.tensor([[3.0, 2.0, 2.0, 2.0, 2.0, -5.0]])
    for top_p in (1.0, 0.9):
        probability = Expected(row, 1.0, 2, top_p).probability[0]
        assert (probability > 0).tolist() == [True] * 5 + [False]
    assert (Expected(row, 1.0, 0, 0.3).probability[0] > 0).sum() == 1


class WrongRowseed(Rowseed):
    """Draws of the next codebook: every distribution test passes, the bits differ."""

    def draw(self, codebook=0):
        return super().draw(codebook + 1)


class Greedy(Multinomial):
    name = "greedy"

    def draw(self, codebook=0):
        return self.of(codebook).argmax(1)


@pytest.fixture
def bench():
    return Bench(torch.device("cpu"), HostClock(budget_s=0.0), draws=512, console=Console(quiet=True))


CASE = Case(16, 256, torch.bfloat16, 50, 1.0, "half")


def test_only_right_samplers_are_timed(bench):
    records = bench.run_all([CASE, CASE._replace(batch=4)], (Rowseed, WrongRowseed, Greedy, Multinomial))
    assert [(r["impl"], r["batch"]) for r in records] == [
        *(("rowseed", 16), ("torch.multinomial a row", 16)),
        *(("rowseed", 4), ("torch.multinomial a row", 4)),
    ]
    assert all(0 < r["p20_us"] <= r["p50_us"] <= r["p80_us"] for r in records)
    assert len(bench.wrong) == 4
    assert "the torch reference" in bench.wrong[0] and "do not follow" in bench.wrong[1]


def test_what_cannot_run_is_skipped_with_its_reason(bench):
    assert bench.run_all([CASE._replace(top_p=0.9)], (OmniUniforms,)) == []
    assert [reason for _, reason in bench.skips] == [
        "vLLM-Omni's predictor raises NotImplementedError for top_p != 1"
    ]
    assert not bench.wrong


class Failing(Multinomial):
    name = "failing"

    def draw(self, codebook=0):
        raise RuntimeError("no such kernel\non this device")


class FailingRowseed(Rowseed):
    def draw(self, codebook=0):
        raise RuntimeError("no such kernel")


def test_a_peer_that_fails_is_skipped_and_ours_is_not(bench):
    assert [r["impl"] for r in bench.run_all([CASE], (Failing, Rowseed))] == ["rowseed"]
    assert list(bench.skips) == [("failing", "it failed: RuntimeError: no such kernel")]
    with pytest.raises(RuntimeError, match="no such kernel"):
        bench.run_all([CASE], (FailingRowseed,))


def test_cases_after_the_time_are_left_out(bench):
    assert bench.run_all([CASE], (Rowseed,), seconds=-1) == []
    assert len(bench.run_all([CASE], (Rowseed,), seconds=60)) == 1


def test_the_gpu_clock_runs_every_mode_and_says_what_no_graph_can_hold():
    bench = Bench(torch.device("cpu"), PretendedClock(), draws=512, console=Console(quiet=True))
    records = bench.run_all([CASE], (Rowseed, Multinomial))
    modes = {
        name: [r["mode"] for r in records if r["impl"] == name] for name in ("rowseed", Multinomial.name)
    }
    assert modes["rowseed"] == ["eager warm", "eager cold", "graph warm", "graph cold"]
    assert modes[Multinomial.name] == ["eager warm", "eager cold"]
    assert list(bench.skips) == [(Multinomial.name, "in a graph: its host generators do not follow a graph")]
    assert not bench.wrong
