"""min_p and log-probabilities: golden rows of a second implementation, and what they mean."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from rowseed.kernels import noise
from rowseed.kernels.sampling import Gather, sample

DATA = Path(__file__).parents[1] / "data"
FILES = {name: json.loads((DATA / f"golden_{name}.json").read_text()) for name in ("min_p", "logprob")}
CASES = [(name, case) for name, file in FILES.items() for case in file["cases"]]
POISON = -77.0


def floats(words):
    return torch.from_numpy(np.array([int(w, 16) for w in words], dtype=np.uint32).view(np.float32))


def logits_of(spec):
    if isinstance(spec, list):
        return torch.tensor([float(x) for x in spec])
    i = torch.arange(spec["V"])
    grid = (i * spec["a"] + spec["b"]) % spec["m"] - spec["m"] // 2
    return (grid.double() / spec["d"] + spec.get("shift", 0)).float()


def column(rows, name, default, dtype=torch.float32):
    return torch.tensor([float(row.get(name, default)) for row in rows]).to(dtype)


@pytest.mark.parametrize(("file", "case"), CASES, ids=lambda v: v if isinstance(v, str) else v["name"])
def test_golden_rows(backend, lines, file, case):
    rows = case["rows"]
    logprob = torch.full((len(rows),), POISON)
    status = torch.full((len(rows),), int(POISON), dtype=torch.int32)
    codes = backend.sample(
        logits_of(case["logits"]).expand(len(rows), -1),
        lines(*((row["seed"], row.get("offset", 0)) for row in rows)),
        temperature=column(rows, "temperature", 0.9),
        top_k=column(rows, "top_k", 50, torch.int32),
        top_p=column(rows, "top_p", 1.0),
        min_p=column(rows, "min_p", 0.0),
        codebook=1,
        status=status,
        logprob=logprob,
    )
    assert codes.tolist() == [row["code"] for row in rows]
    assert status.tolist() == [row["status"] for row in rows]
    assert [f"{w & 0xFFFFFFFF:08x}" for w in logprob.view(torch.int32).tolist()] == [
        row["logprob"] for row in rows
    ]


def test_golden_arithmetic():
    min_p, bound = zip(*FILES["min_p"]["log2"], strict=True)
    assert torch.equal(noise.log2(floats(min_p)), floats(bound))
    t, total, share = zip(*FILES["logprob"]["log_share"], strict=True)
    assert torch.equal(noise.log_share(floats(t), torch.tensor(total)), floats(share))


def test_logprob_is_the_logarithm_of_the_probability(lines):
    """Against float64 softmax over what the filters keep, at the accuracy that float32 logits allow."""
    torch.manual_seed(5)
    B = 200
    logits = torch.randn(B, 2048) * 3
    logprob = torch.empty(B)
    streams = lines(*((seed, 7) for seed in range(B)))
    codes = sample(logits, streams, temperature=0.8, top_k=40, min_p=0.01, logprob=logprob)
    tempered = logits.double() / float(np.float32(0.8))
    kept = logits >= logits.topk(40).values[:, -1:]
    kept &= tempered >= tempered.amax(-1, keepdim=True) + math.log(0.01)
    exact = tempered.masked_fill(~kept, -math.inf).log_softmax(-1).gather(1, codes[:, None])[:, 0]
    torch.testing.assert_close(logprob.double(), exact, atol=3e-6, rtol=0)
    assert (kept.sum(-1) < 40).any(), "min_p decided nowhere: the test would not see it"


def test_min_p_off_changes_nothing(lines):
    logits, streams = torch.randn(64, 512), lines(*((seed, 3) for seed in range(64)))
    plain = sample(logits, streams, top_k=30)
    assert torch.equal(plain, sample(logits, streams, top_k=30, min_p=torch.zeros(64)))
    assert torch.equal(plain, sample(logits, streams, top_k=30, min_p=2.0**-127))
    assert not torch.equal(plain, sample(logits, streams, top_k=30, min_p=0.9))


def test_logprob_of_inactive_rows_is_left_alone(backend, lines):
    logprob = torch.full((3,), POISON)
    streams = lines((1, 0), (2, 0), (3, 0), in_use=2)
    streams[1, 2] |= 2
    backend.sample(torch.zeros(3, 8), streams, logprob=logprob)
    assert logprob[0] == POISON and logprob[2] == POISON
    assert math.isclose(logprob[1], -math.log(8), abs_tol=1e-6)


def test_logprob_beside_the_epilogue(backend, lines):
    logits, streams = torch.randn(3, 64), lines((1, 0), (2, 0), (3, 0))
    table, total, logprob = torch.randn(64, 5), torch.zeros(3, 5), torch.zeros(3)
    alone = torch.zeros(3)
    backend.sample(logits, streams, top_k=9, logprob=alone)
    codes = backend.sample(logits, streams, top_k=9, logprob=logprob, gather=Gather(table, total))
    assert torch.equal(total, table[codes])
    assert torch.equal(logprob, alone) and (alone < 0).all()


def test_outputs_stay_outside_of_autograd(backend, lines):
    logits = torch.randn(2, 64, requires_grad=True)
    table = torch.randn(64, 5, requires_grad=True)
    total, logprob = torch.zeros(2, 5), torch.zeros(2)
    backend.sample(logits, lines((1, 0), (2, 0)), logprob=logprob, gather=Gather(table, total))
    assert not logprob.requires_grad and not total.requires_grad


@pytest.mark.parametrize("min_p", [-0.1, 1.5, math.nan, True, "0.1"])
def test_refuses_a_bad_min_p(lines, min_p):
    with pytest.raises((TypeError, ValueError), match="min_p must be"):
        sample(torch.zeros(1, 8), lines((1, 0)), min_p=min_p)


@pytest.mark.parametrize("logprob", [torch.zeros(2), torch.zeros(1, dtype=torch.float64)])
def test_refuses_a_bad_logprob(lines, logprob):
    with pytest.raises((TypeError, ValueError), match="logprob must"):
        sample(torch.zeros(1, 8), lines((1, 0)), logprob=logprob)
