"""Code 0 on the V2 runner, on vLLM's own sampler object: V1's codes, and what stays vLLM's."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from code0_runners import draw_v1, light_v1, seeded
from code0_runners_v2 import SLOTS, Runner, V
from torch.utils._python_dispatch import TorchDispatchMode
from v2_runner import make_sampler
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.sampler import Sampler

from rowseed.vllm_omni.metrics import counters
from rowseed.vllm_omni.worker import code0


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.delenv("ROWSEED_CODE0", raising=False)
    monkeypatch.setattr(code0, "_said", set())


@pytest.fixture
def logits():
    return torch.randn(8, V, generator=torch.Generator().manual_seed(3)) * 2


@pytest.mark.parametrize(
    "filters", [dict(), dict(top_k=6), dict(top_p=0.8), dict(top_k=6, top_p=0.8)], ids=str
)
def test_equal_logits_give_the_codes_of_the_v1_runner(logits, filters):
    params, frames = seeded(*range(8), **filters), np.arange(8)
    k = torch.full((8,), filters["top_k"], dtype=torch.int32) if "top_k" in filters else None
    p = torch.full((8,), filters["top_p"]) if "top_p" in filters else None
    v2 = Runner(params, frames)
    tokens, processed = v2.draw(logits.clone())
    assert tokens.dtype == torch.int64 and torch.equal(processed, logits)
    assert tokens.tolist() == draw_v1(light_v1(params, frames), logits, k, p)
    assert v2.draw(logits.clone())[0].tolist() == tokens.tolist()


def test_seed_base_offset_and_bad_values_as_on_v1(logits):
    params = [
        SamplingParams(seed=4, extra_args={"tts_local_seed": 9, "tts_local_offset": 5}),
        SamplingParams(extra_args={"tts_local_seed": 9}),
        SamplingParams(extra_args={"tts_local_seed": 2**64 - 1}),
    ]
    v2, v1 = Runner(params, frames=2), light_v1(params, frames=2)
    assert v2.draw(logits[:3].clone())[0].tolist() == draw_v1(v1, logits[:3])
    lines = v2.sampler._sample_random.rows.streams.tensor[1:4].tolist()
    assert lines == [[4, 7, 1], [9, 2, 1], [-1, 2, 1]]


def test_unseeded_rows_are_equal_to_nothing_else():
    v2, flat = Runner(seeded(*[None] * 8)), torch.zeros(8, V)
    codes = [tuple(v2.draw(flat)[0].tolist()) for _ in range(4)]
    assert len(set(codes)) == 4 and all(len(set(step)) > 2 for step in codes)


def test_rows_of_temperature_0_stay_greedy_beside_sampled_ones(logits):
    params = [SamplingParams(temperature=0.0), *seeded(7), SamplingParams(temperature=0.0)]
    codes = Runner(params).draw(logits[:3].clone())[0].tolist()
    assert [codes[0], codes[2]] == logits[[0, 2]].argmax(1).tolist()
    assert codes[1] == draw_v1(light_v1(seeded(7)), logits[1:2])[0]


def test_bfloat16_logits_that_nothing_was_done_to(logits):
    logits = logits.bfloat16()
    assert Runner(seeded(*range(8))).draw(logits)[0].tolist() == draw_v1(
        light_v1(seeded(*range(8))), logits.float()
    )


def test_a_flagged_row_is_counted_and_named(logits, log):
    v2 = Runner(seeded(7, 8))
    log.clear()
    before = counters().flagged.get("nan", 0)
    logits[1, 9] = torch.nan
    v2.draw(logits[:2].clone())
    assert counters().flagged["nan"] == before + 1
    assert [record.getMessage().split(";")[0] for record in log] == ["rowseed: request r1 met NaN logits"]


def test_equal_operators_whether_rows_are_seeded_or_not():
    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(function.name())
            return function(*args, **(kwargs or {}))

    seen = []
    for count in (0, 1, 64):
        v2 = Runner(seeded(*range(count), *[None] * (64 - count), top_k=5))
        v2.draw(torch.zeros(64, V))
        names = []
        with Count():
            v2.draw(torch.zeros(64, V))
        seen.append(names)
    assert seen[0] == seen[1] == seen[2]
    assert seen[0].count("rowseed::sample") == 1
    assert not {name for name in seen[0] if "_local_scalar" in name or "item" in name}


class OtherSampler(Sampler):
    pass


def made(**kwargs):
    return lambda: dict(sampler=make_sampler(SLOTS, V, **kwargs))


def other_sampler():
    sampler = make_sampler(SLOTS, V)
    sampler.__class__ = OtherSampler
    return dict(sampler=sampler)


def other_signature():
    sampler = make_sampler(SLOTS, V)
    sampler._sample_random = lambda processed_logits, pos: None
    return dict(sampler=sampler)


OBSTACLES = {
    "processed": (made(logprobs_mode="processed_logprobs"), "logprobs_mode is processed_logprobs"),
    "fp64": (made(use_fp64_gumbel=True), "fp64 Gumbel noise"),
    "mask": (made(return_sampling_mask=True), "the sampling mask is returned"),
    "speculative": (lambda: dict(speculative_config=SimpleNamespace()), "speculative decoding"),
    "sampler": (other_sampler, "the runner's sampler is of type OtherSampler"),
    "signature": (other_signature, "found (processed_logits, pos)"),
}


@pytest.mark.parametrize(("others", "reason"), OBSTACLES.values(), ids=OBSTACLES)
def test_vllms_draw_stays_where_ours_is_not_known_to_fit_and_that_is_said_once(log, others, reason):
    others = others()
    for _ in range(2):
        assert not Runner(seeded(7), **others).joined
    (line,) = [record.getMessage() for record in log]
    assert line.startswith("rowseed: code 0 is drawn by vLLM, not from the row streams: ") and reason in line


def test_the_switch_and_a_stage_that_is_no_talker(log, monkeypatch):
    assert not Runner(seeded(7), model=SimpleNamespace()).joined
    assert not log
    monkeypatch.setenv("ROWSEED_CODE0", "vllm")
    assert not Runner(seeded(7)).joined
    (record,) = log
    assert record.getMessage().endswith(": ROWSEED_CODE0=vllm")


def test_the_samplers_type_stays_and_other_samplers_are_as_they_were():
    v2 = Runner(seeded(7))
    assert v2.joined and v2.custom is None
    assert type(v2.sampler) is Sampler
    assert "_sample_random" not in vars(make_sampler(SLOTS, V))
