"""Robustness to moving logits: how many codes change when logits move a little.

A server's logits move when a GEMM picks another kernel for another batch size. Every draw rule
must then change some codes: at least the total-variation distance between the two
distributions. This measures how many more each rule changes, with the same randomness on both
sides:

- `rowseed`: this project's `sample`, noise keyed by token id;
- `gumbel by rank`: the same race, its noise keyed by the token's rank among the logits;
- `inverse cdf by id`: one uniform a row against the cumulative probabilities in token order;
- `inverse cdf by rank`: the same in order of descending probability.
"""

import argparse
import sys
from pathlib import Path

import torch
from rich.progress import track

from rowseed.kernels.sampling import sample
from rowseed.kernels.streams import RowStreams

sys.path.append(str(Path(__file__).parent))  # for `python bench/flips.py` and `-m bench.flips` alike

from records import Record, write_json

VOCAB, TOP_K, TEMPERATURE = 2048, 50, 0.9
LOGITS = ((torch.bfloat16, 2.0), (torch.float32, 2.0), (torch.bfloat16, 1.0), (torch.bfloat16, 4.0))
"""Dtype and standard deviation of the logits."""

NOISE_SDS = (0.002, 0.01, 0.05)
FLOOR = "total variation"


def kept_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """float64 [N, V] probabilities after temperature and top-k, ties at the k-th value kept."""
    scaled = logits.double() / TEMPERATURE
    kth = scaled.topk(TOP_K, dim=1).values[:, -1:]
    return scaled.masked_fill(scaled < kth, -torch.inf).softmax(1)


def inverse_cdf(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Index [N] of the first token whose cumulative probability exceeds uniform [N, 1]."""
    return (probabilities.cumsum(1) <= uniform).sum(1).clamp_max(probabilities.shape[1] - 1)


def codes_of(logits: torch.Tensor, streams: torch.Tensor, gumbel: torch.Tensor, uniform: torch.Tensor):
    """Codes [N] of every rule, by name, and the probabilities that they were drawn from."""
    probabilities = kept_probabilities(logits)
    by_rank, tokens = probabilities.sort(dim=1, descending=True, stable=True)
    ranks = {
        "gumbel by rank": (by_rank.log() + gumbel).argmax(1),
        "inverse cdf by rank": inverse_cdf(by_rank, uniform),
    }
    codes = {rule: tokens.gather(1, rank[:, None])[:, 0] for rule, rank in ranks.items()}
    codes["inverse cdf by id"] = inverse_cdf(probabilities, uniform)
    codes["rowseed"] = sample(logits, streams, temperature=TEMPERATURE, top_k=TOP_K, backend="torch")
    return codes, probabilities


def measure(
    logit_sd: float, noise_sd: float, dtype: torch.dtype, rows: int, chunk: int = 2000
) -> list[Record]:
    """Records of one point: `rows` logit rows of standard deviation `logit_sd`, moved by `noise_sd`."""
    random = torch.Generator().manual_seed(1)
    flips: dict[str, int] = {}
    distance = 0.0
    for first in range(0, rows, chunk):
        count = min(chunk, rows - first)
        normal = lambda: torch.randn(count, VOCAB, generator=random)  # noqa: B023, E731
        before = normal() * logit_sd
        after = before + normal() * noise_sd
        gumbel = -torch.empty(count, VOCAB, dtype=torch.float64).exponential_(generator=random).log()
        uniform = torch.rand(count, 1, dtype=torch.float64, generator=random)
        streams = RowStreams(count, "cpu", global_seed=0).pack(range(first, first + count), [0] * count)
        one, p = codes_of(before.to(dtype), streams, gumbel, uniform)
        two, q = codes_of(after.to(dtype), streams, gumbel, uniform)
        for rule in one:
            flips[rule] = flips.get(rule, 0) + int((one[rule] != two[rule]).sum())
        distance += float((p - q).abs().sum()) / 2
    shares = {rule: count / rows for rule, count in flips.items()} | {FLOOR: distance / rows}
    return [
        {
            "rule": rule,
            "logit_sd": logit_sd,
            "noise_sd": noise_sd,
            "vocab": VOCAB,
            "dtype": str(dtype).removeprefix("torch."),
            "top_k": TOP_K,
            "temperature": TEMPERATURE,
            "rows": rows,
            "share": round(share, 6),
            "share_se": 0.0 if rule == FLOOR else round((share * (1 - share) / rows) ** 0.5, 6),
        }
        for rule, share in shares.items()
    ]


def main(arguments: list[str] | None = None) -> list[Record]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the records there")
    parser.add_argument("--rows", type=int, default=4000, help="rows a point (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="logits of sd 2 in bfloat16 only, 2000 rows")
    options = parser.parse_args(arguments)
    if options.rows < 1:
        parser.error(f"--rows must be at least 1, got {options.rows}")
    rows = min(options.rows, 2000) if options.quick else options.rows
    points = [
        (logit_sd, noise_sd, dtype)
        for dtype, logit_sd in (LOGITS[:1] if options.quick else LOGITS)
        for noise_sd in NOISE_SDS
    ]
    records = []
    for point in track(points, "flips", transient=True):
        records += measure(*point, rows)
    if options.json:
        write_json(options.json, "flips", records)
    print(f"share of {rows} codes that change when logits (of standard deviation sd) move")
    for record in records[: len(NOISE_SDS) * 5]:  # the first kind of logits: five rules each
        print("  {dtype:9} sd {logit_sd:g}, moved by {noise_sd:<5g} {rule:20} {share:.4f}".format(**record))
    return records


if __name__ == "__main__":
    main()
