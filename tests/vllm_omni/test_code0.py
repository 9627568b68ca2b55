"""Code 0 on the V1 runner: its seed and offset, what stays vLLM's, and that it is drawn as often."""

import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from code0_runners import batch_v1, draw_v1, light_v1, seeded
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from rowseed.kernels.sampling import sample
from rowseed.kernels.streams import RowStreams
from rowseed.vllm_omni.metrics import counters
from rowseed.vllm_omni.worker import code0, code0_v1, row_packing
from rowseed.vllm_omni.worker.flagged_rows import Once

V = 64
EOS = 5


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.delenv("ROWSEED_CODE0", raising=False)
    monkeypatch.setattr(code0, "_said", set())
    monkeypatch.setattr(row_packing, "_once", Once())


@pytest.fixture
def logits():
    return torch.randn(8, V, generator=torch.Generator().manual_seed(3)) * 2


def alone(logits, seed, frame, **filters):
    lines = RowStreams(1, "cpu").pack([seed], [frame])
    return int(sample(logits[None], lines, codebook=0, **filters))


def messages(log):
    return [record.getMessage() for record in log]


# Which seed, which offset


def test_the_row_is_its_seed_and_the_frame_that_it_begins(logits):
    runner = light_v1(seeded(7, 8, 7), frames=[0, 4, 11])
    expected = [alone(logits[row], seed, frame) for row, seed, frame in [(0, 7, 0), (1, 8, 4), (2, 7, 11)]]
    assert draw_v1(runner, logits[:3]) == expected
    assert runner.sampler.topk_topp_sampler.rows.streams.tensor[1:, 1].tolist() == [0, 4, 11]


def params(seed=None, **extra_args):
    return SimpleNamespace(seed=seed, extra_args=extra_args or None)


CASES = {
    "the speech's seed alone": (params(None, tts_local_seed=9), 9, 2),
    "an explicit seed wins": (params(4, tts_local_seed=9), 4, 2),
    "a bare seed": (params(4), 4, 2),
    "2^64 - 1 is -1": (params(2**64 - 1), -1, 2),
    "a stream continued elsewhere": (params(None, tts_local_seed=9, tts_local_offset=5), 9, 7),
    "an explicit seed has that offset too": (params(4, tts_local_seed=9, tts_local_offset=5), 4, 7),
    "the offset wraps": (params(4, tts_local_offset=2**63 - 1), 4, -(2**63) + 1),
}


@pytest.mark.parametrize(("given", "seed", "offset"), CASES.values(), ids=CASES)
def test_where_seed_and_offset_come_from(logits, given, seed, offset):
    assert draw_v1(light_v1([given], frames=2), logits[:1]) == [alone(logits[0], seed, offset)]


def test_minus_one_is_no_seed_on_the_wire_and_the_speechs_seed_counts(logits):
    given = SamplingParams(seed=-1, extra_args={"tts_local_seed": -1})
    assert given.seed is None
    assert draw_v1(light_v1([given], frames=2), logits[:1]) == [alone(logits[0], -1, 2)]


BAD = [params("abc"), params(2**64), params(True), params(None, tts_local_seed=1.5)]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_bad_seed_leaves_its_row_unseeded_and_is_named(logits, log, bad):
    runner = light_v1([bad, *seeded(7)])
    log.clear()
    codes = draw_v1(runner, logits[:2])
    assert codes[1] == alone(logits[1], 7, 0)
    assert runner.sampler.topk_topp_sampler.rows.streams.tensor[1:, 2].tolist() == [0, 1]
    (line,) = messages(log)
    assert "request r0 is sampled unseeded" in line and "seed must be an int" in line


def test_unseeded_rows_are_equal_to_nothing_else(logits):
    flat = torch.zeros(8, 4096)
    runner = light_v1(seeded(*[None] * 8))
    codes = [*draw_v1(runner, flat), *draw_v1(runner, flat)]
    assert len(set(codes)) == 16


def test_neighbours_and_the_place_in_the_batch_do_not_matter(logits):
    expected = alone(logits[0], 7, 3)
    for neighbours in ([None], [7, None, 8], [*range(6)]):
        for place in range(len(neighbours) + 1):
            seeds = [*neighbours[:place], 7, *neighbours[place:]]
            batch = logits[torch.arange(len(seeds))].clone()
            batch[place] = logits[0]
            assert draw_v1(light_v1(seeded(*seeds), frames=3), batch)[place] == expected


def test_no_generator_is_drawn_from_or_left_to_be_rewound(logits):
    generator = torch.Generator().manual_seed(7)
    before, generators = generator.get_state(), {0: generator}
    draw_v1(light_v1(seeded(7)), logits[:1], generators=generators)
    assert torch.equal(generator.get_state(), before)
    assert not generators


def test_equal_operators_whether_rows_are_seeded_or_not():
    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(function.name())
            return function(*args, **(kwargs or {}))

    logits, k = torch.zeros(64, V), torch.full((64,), 5, dtype=torch.int32)
    seen = []
    for count in (0, 1, 64):
        runner = light_v1(seeded(*range(count), *[None] * (64 - count)))
        names = []
        with Count():
            runner.sampler.topk_topp_sampler(logits, {}, k, None)
        seen.append(names)
    assert seen[0] == seen[1] == seen[2]
    assert seen[0].count("rowseed::sample") == 1 and len(seen[0]) < 16


def test_a_flagged_row_is_counted_and_named_and_no_neighbour_moves(logits, log):
    runner = light_v1(seeded(7, 7, 7))
    expected = [alone(logits[row], 7, 0) for row in range(3)]
    log.clear()
    before = dict(counters().flagged)
    logits[1, 9], logits[2] = torch.nan, -torch.inf
    codes = draw_v1(runner, logits[:3])
    assert codes[0] == expected[0] and codes[1] != 9 and codes[2] == 0
    assert counters().flagged["nan"] == before.get("nan", 0) + 1
    assert counters().flagged["dead"] == before.get("dead", 0) + 1
    assert [line.split(";")[0] for line in messages(log)] == [
        "rowseed: request r1 met NaN logits",
        "rowseed: request r2 met logits with nothing to draw",
    ]


# What stays vLLM's


class OtherSampler(Sampler):
    pass


class OtherDraw(TopKTopPSampler):
    pass


def sampler(mode="raw_logprobs", draw=None):
    made = Sampler(mode)
    if draw is not None:
        made.topk_topp_sampler = draw
    return made


def with_(draw, **attributes):
    for name, value in attributes.items():
        setattr(draw, name, value)
    return draw


def without_mode():
    made = Sampler()
    del made.topk_topp_sampler.logprobs_mode
    return made


OBSTACLES = {
    "processed logits": (dict(sampler=sampler("processed_logits")), "logprobs_mode is processed_logits"),
    "processed logprobs": (dict(sampler=sampler("processed_logprobs")), "is processed_logprobs"),
    "speculative": (dict(speculative_config=SimpleNamespace()), "speculative decoding"),
    "fp64": (dict(sampler=sampler(draw=with_(TopKTopPSampler(), use_fp64_gumbel=True))), "fp64 Gumbel noise"),
    "sampler": (dict(sampler=OtherSampler()), "the runner's sampler is of type OtherSampler"),
    "draw": (dict(sampler=sampler(draw=OtherDraw())), "the sampler draws with a OtherDraw"),
    "unknown": (dict(sampler=without_mode()), "AttributeError: "),
    "signature": (
        dict(sampler=sampler(draw=with_(TopKTopPSampler(), forward=lambda logits, generators, k: None))),
        "(logits, generators, k, p), found (logits, generators, k)",
    ),
}


@pytest.mark.parametrize(("others", "reason"), OBSTACLES.values(), ids=OBSTACLES)
def test_vllms_draw_stays_where_ours_is_not_known_to_fit_and_that_is_said_once(log, others, reason):
    runner = light_v1(seeded(7), bind=False, **others)
    draw = runner.sampler.topk_topp_sampler
    code0_v1.bind(runner)
    code0_v1.bind(runner)
    assert runner.sampler.topk_topp_sampler is draw
    (line,) = messages(log)
    assert line.startswith("rowseed: code 0 is drawn by vLLM, not from the row streams: ") and reason in line


def test_the_switch(log, monkeypatch):
    monkeypatch.setenv("ROWSEED_CODE0", "vllm")
    runner = light_v1(seeded(7))
    assert type(runner.sampler.topk_topp_sampler) is TopKTopPSampler
    assert [line.endswith(": ROWSEED_CODE0=vllm") for line in messages(log)] == [True]


def test_a_switch_that_is_not_understood_is_named_and_changes_nothing(log, monkeypatch):
    monkeypatch.setenv("ROWSEED_CODE0", "off")
    runner = light_v1(seeded(7))
    assert isinstance(runner.sampler.topk_topp_sampler, code0_v1.V1Draw)
    assert [record.levelno for record in log] == [logging.WARNING, logging.INFO]
    assert messages(log)[0] == "ROWSEED_CODE0 must be rowseed or vllm, got 'off': taken as rowseed"


def test_no_class_is_touched_and_a_second_binding_changes_nothing():
    forward = Sampler.forward, Sampler.sample, TopKTopPSampler.forward_native
    runner = light_v1(seeded(7))
    draw = runner.sampler.topk_topp_sampler
    code0_v1.bind(runner)
    assert runner.sampler.topk_topp_sampler.upstream is draw.upstream
    assert type(draw.upstream) is TopKTopPSampler
    assert (Sampler.forward, Sampler.sample, TopKTopPSampler.forward_native) == forward
    assert type(Sampler().topk_topp_sampler) is TopKTopPSampler


def test_a_dummy_run_goes_through_vllms_draw_too(logits, log):
    runner = light_v1(seeded(7, 8))
    log.clear()
    runner.input_batch.num_reqs, runner.input_batch.req_ids = 0, []
    k, p = torch.full((2,), V - 1), torch.full((2,), 0.9)
    codes = draw_v1(runner, logits[:2], k, p, {0: torch.Generator().manual_seed(0)})
    assert all(0 <= code < V for code in codes)
    assert not log


def test_rows_that_are_not_the_batchs_are_left_to_vllm_and_that_is_said(logits, log):
    runner = light_v1(seeded(7, 8))
    log.clear()
    draw_v1(runner, logits[:1]), draw_v1(runner, logits[:1])
    (line,) = messages(log)
    assert "the sampler got 1 rows, not one a request" in line


def bad_words(*words):
    made = SamplingParams(seed=7)
    made._bad_words_token_ids = [[word] for word in words]
    return made


OPTIONS = {
    "repetition penalty": SamplingParams(seed=7, repetition_penalty=1.7),
    "frequency, presence": SamplingParams(seed=7, frequency_penalty=0.9, presence_penalty=-0.7),
    "min_tokens": SamplingParams(seed=7, min_tokens=9, stop_token_ids=[EOS]),
    "allowed ids": SamplingParams(seed=7, allowed_token_ids=[1, 5, 6, 40]),
    "bad words": bad_words(11, 12),
    "logit bias": SamplingParams(seed=7, logit_bias={3: -100.0, 8: 4.0}),
    "min_p": SamplingParams(seed=7, min_p=0.2),
    "temperature": SamplingParams(seed=7, temperature=0.6),
    "logprobs": SamplingParams(seed=7, logprobs=5),
    "top-k, top-p": SamplingParams(seed=7, top_k=6, top_p=0.8),
    "greedy": SamplingParams(temperature=0.0),
}


def run(runner, logits):
    """vLLM's whole sampler; its output, and the logits that came to the draw."""
    seen = []

    def look(_, arguments):
        seen.append(arguments[0].clone())

    runner.sampler.topk_topp_sampler.register_forward_pre_hook(look)
    return runner.sampler(logits=logits.clone(), sampling_metadata=runner.input_batch.sampling_metadata), seen


@pytest.mark.parametrize("name", OPTIONS)
def test_upstreams_options_reach_the_draw_as_without_it(logits, name):
    """One row with the option, one seeded and one greedy row without any."""
    mixed = [OPTIONS[name], SamplingParams(seed=8), SamplingParams(temperature=0.0)]
    outputs = [EOS, 9, 9]
    plain, bound = batch_v1(mixed, V, outputs), batch_v1(mixed, V, outputs)
    code0_v1.bind(bound)
    (theirs, before), (ours, after) = run(plain, logits[:3]), run(bound, logits[:3])
    assert torch.equal(before[0], after[0])
    given = OPTIONS[name]
    codes, others = ours.sampled_token_ids[:, 0], theirs.sampled_token_ids[:, 0]
    assert codes.dtype == others.dtype and codes.shape == others.shape
    assert codes[2] == others[2] == logits[2].argmax()
    assert codes[1] == alone(after[0][1], 8, 3)
    if name == "greedy":
        assert codes[0] == others[0] == logits[0].argmax()
    else:
        filters = dict(top_k=6, top_p=0.8) if name == "top-k, top-p" else {}
        assert codes[0] == alone(after[0][0], 7, 3, **filters)
    if given.logprobs:
        kept = ours.logprobs_tensors.logprobs, theirs.logprobs_tensors.logprobs
        assert torch.equal(kept[0][:, 1:], kept[1][:, 1:])
        own = logits[:3].log_softmax(-1).gather(1, codes.long()[:, None])
        assert torch.equal(kept[0][:, :1], own)


# As often as vLLM

DRAWS = 30_000
ACCEPT, REJECT = 1e-3, 1e-9


@pytest.fixture(scope="module")
def many():
    """A runner of DRAWS rows, each of its own seed."""
    return light_v1([SimpleNamespace(seed=seed, extra_args=None) for seed in range(DRAWS)], frames=3)


@pytest.fixture(scope="module")
def row():
    return torch.randn(V, generator=torch.Generator().manual_seed(4)) * 1.5


def vllms(row, k, p):
    torch.manual_seed(1)
    ks = None if k is None else torch.full((DRAWS,), k, dtype=torch.int32)
    ps = None if p is None else torch.full((DRAWS,), p)
    return TopKTopPSampler().forward_native(row.repeat(DRAWS, 1), {}, ks, ps)[0].numpy()


def rowseeds(many, row, k, p):
    ks = None if k is None else torch.full((DRAWS,), k, dtype=torch.int32)
    ps = None if p is None else torch.full((DRAWS,), p)
    return np.array(draw_v1(many, row.repeat(DRAWS, 1), ks, ps))


def same_distribution(a, b):
    """p-value that two samples of tokens are of one distribution; rare tokens are taken together."""
    counts = np.array([np.bincount(sample, minlength=V) for sample in (a, b)])
    rare = counts.sum(0) < 20
    pooled = np.concatenate([counts[:, ~rare], counts[:, rare].sum(1, keepdims=True)], 1)
    return stats.chi2_contingency(pooled[:, pooled.sum(0) > 0]).pvalue


FILTERS = [(None, None), (10, None), (None, 0.8), (10, 0.8)]


@pytest.mark.parametrize(("k", "p"), FILTERS, ids=str)
def test_codes_are_drawn_as_often_as_by_vllm(many, row, k, p):
    ours, theirs = rowseeds(many, row, k, p), vllms(row, k, p)
    assert set(ours) == set(theirs) or (k, p) == (None, None)
    assert same_distribution(ours, theirs) > ACCEPT
    assert same_distribution(rowseeds(many, row * 1.08, k, p), theirs) < REJECT  # a temperature 8 % off


def test_the_end_of_speech_is_drawn_as_often_as_it_is_likely(many, row):
    row = row.clone()
    row[EOS] = -math.inf
    row[EOS] = row.logsumexp(0) + math.log(0.02 / 0.98)

    def fit(logits):
        ends = int((rowseeds(many, logits, None, None) == EOS).sum())
        return stats.binomtest(ends, DRAWS, 0.02).pvalue

    assert fit(row) > ACCEPT
    row[EOS] += 0.35  # with 2.8 %, a speech ends a frame or two early
    assert fit(row) < REJECT
