"""The draw rules' shares of flipped codes, at a small size."""

import flips
import torch


def test_rowseed_flips_near_the_floor_and_far_less_than_a_cdf():
    records = flips.measure(2.0, 0.05, torch.float32, rows=400)
    share = {record["rule"]: record["share"] for record in records}
    assert set(share) == {
        "rowseed",
        "gumbel by rank",
        "inverse cdf by rank",
        "inverse cdf by id",
        flips.FLOOR,
    }
    # No rule can flip fewer than the total variation: 3 standard errors below it at most (400 rows).
    assert share["rowseed"] > share[flips.FLOOR] - 3 * (share[flips.FLOOR] / 400) ** 0.5
    assert share["rowseed"] * 2 < share["inverse cdf by id"] < share["inverse cdf by rank"]


def test_nothing_flips_when_nothing_moves():
    records = flips.measure(2.0, 0.0, torch.bfloat16, rows=50)
    assert all(record["share"] == 0 for record in records)


def test_every_rule_draws_from_the_kept_distribution():
    """Chi-square over the kept tokens of one row, 2,000 draws; limit: upper 1e-6 point."""
    from scipy.stats import chi2

    random, count = torch.Generator().manual_seed(3), 2000
    logits = (torch.randn(1, flips.VOCAB, generator=random) * 2).expand(count, -1)
    gumbel = -torch.empty(count, flips.VOCAB, dtype=torch.float64).exponential_(generator=random).log()
    uniform = torch.rand(count, 1, dtype=torch.float64, generator=random)
    streams = flips.RowStreams(count, "cpu", global_seed=0).pack(range(count), [0] * count)
    codes, probabilities = flips.codes_of(logits, streams, gumbel, uniform)
    expected = probabilities[0] * count
    kept = expected > 0
    for rule, drawn in codes.items():
        counts = torch.bincount(drawn, minlength=flips.VOCAB).double()
        assert counts[~kept].sum() == 0, rule
        statistic = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
        assert statistic < chi2.isf(1e-6, int(kept.sum()) - 1), rule
