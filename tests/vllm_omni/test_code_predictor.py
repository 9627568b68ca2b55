"""The cached code predictor against the official implementation and vLLM-Omni's."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from predictors import (
    REAL,
    TINY,
    SeededCodePredictor,
    TheirCodePredictor,
    frame_inputs,
    make_predictor,
    randomise,
    teacher_forced,
    their_teacher_forced,
)
from safetensors.torch import load_file

from rowseed.kernels.streams import RowStreams

DATA = Path(__file__).parents[1] / "data"
# The official implementation's logits, float32, another order of summation: the largest seen is 1.5e-6.
OFFICIAL_TOLERANCE = 1e-5
# Real size, logits of sd 0.58; the largest difference seen is 4e-6.
FLOAT32_TOLERANCE = 3e-5


@pytest.fixture(params=[32, 48], ids=["same-size", "projection"])
def predictor(request) -> SeededCodePredictor:
    torch.manual_seed(0)
    predictor = make_predictor(talker_hidden=request.param, **TINY)
    randomise(predictor)
    return predictor


def hidden_of(predictor) -> int:
    return predictor.talker_config.hidden_size


@pytest.fixture(scope="module")
def official():
    """qwen-tts 0.1.1's code predictor with random weights: its inputs, greedy codes and logits."""
    data = {name: value for name, value in load_file(DATA / "qwen_tts_parity.safetensors").items()}
    codes = data["expected.codes"]
    predictor = make_predictor(
        **REAL
        | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    )
    weights = [(name, w.float()) for name, w in data.items() if name.startswith(("model.", "lm_head."))]
    for i in range(15):  # the file holds only the embeddings of the codes that were met
        table = torch.zeros(2048, 64)
        if i < 14:
            table[codes[:, i]] = data[f"visited.{i}"].float()
        weights.append((f"model.codec_embedding.{i}.weight", table))
    loaded = predictor.load_weights(iter(weights))
    assert loaded == {name for name, _ in predictor.named_parameters()}
    return predictor, data


def test_official_greedy_codes(official):
    predictor, data = official
    codes = predictor(data["inputs.code0"], data["inputs.embed"], data["inputs.hidden"], do_sample=False)
    assert torch.equal(codes[:, 1:], data["expected.codes"])
    assert torch.equal(codes[:, :1], data["inputs.code0"])


def test_official_logits(official):
    predictor, data = official
    codes = torch.cat((data["inputs.code0"], data["expected.codes"]), 1)
    inputs = data["inputs.code0"], data["inputs.embed"], data["inputs.hidden"]
    logits = teacher_forced(predictor, inputs, codes)
    torch.testing.assert_close(logits, data["expected.logits"], atol=OFFICIAL_TOLERANCE, rtol=0)
    wrong = codes.roll(1, 0)
    assert (teacher_forced(predictor, inputs, wrong) - data["expected.logits"]).abs().max() > 1e-2


@pytest.mark.parametrize("talker_hidden", [1024, 2048], ids=["0.6B", "1.7B"])
def test_real_size_logits_equal_theirs(talker_hidden):
    torch.manual_seed(0)
    layers = {"num_hidden_layers": 5 if talker_hidden == 1024 else 1}
    predictor = make_predictor(talker_hidden=talker_hidden, **REAL | layers)
    randomise(predictor)
    inputs = frame_inputs(2, talker_hidden, vocab=2048)
    codes = torch.randint(0, 2048, (2, 16))
    ours = teacher_forced(predictor, inputs, codes)
    theirs = their_teacher_forced(predictor, inputs, codes)
    torch.testing.assert_close(ours, theirs, atol=FLOAT32_TOLERANCE, rtol=0)


def test_greedy_codes_equal_theirs(predictor):
    inputs = frame_inputs(5, hidden_of(predictor))
    theirs = TheirCodePredictor.forward(predictor, *inputs, do_sample=False)
    assert torch.equal(predictor(*inputs, do_sample=False), theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_good_as_theirs(dtype):
    """Against a float32 run of the same rounded weights, our error is not above vLLM-Omni's."""
    torch.manual_seed(0)
    predictor = make_predictor(dtype=dtype, **TINY | {"hidden_size": 128, "intermediate_size": 256})
    randomise(predictor)
    exact = make_predictor(**TINY | {"hidden_size": 128, "intermediate_size": 256})
    exact.load_state_dict(predictor.state_dict())
    inputs = frame_inputs(32, 128, dtype)
    codes = torch.randint(0, 64, (32, 6))
    truth = their_teacher_forced(exact, (inputs[0], inputs[1].float(), inputs[2].float()), codes)
    ours = (teacher_forced(predictor, inputs, codes) - truth).square().mean().sqrt()
    theirs = (their_teacher_forced(predictor, inputs, codes) - truth).square().mean().sqrt()
    assert 0 < ours <= 1.05 * theirs


def test_frame_sum_is_the_gather(predictor):
    inputs = frame_inputs(5, hidden_of(predictor))
    codes = predictor(*inputs, do_sample=False)
    tables = torch.stack([table.weight for table in predictor.get_input_embeddings()])
    gathered = tables.detach()[torch.arange(5), codes[:, 1:]].sum(1)
    torch.testing.assert_close(predictor.frame_sum, gathered, atol=1e-6, rtol=0)


def streams_of(seeds: list[int | None], offsets: list[int], rows: int = 8) -> torch.Tensor:
    return RowStreams(rows, "cpu", global_seed=5).pack(seeds, offsets)


def test_seeded_rows_depend_on_nothing_else(predictor):
    code0, embed, hidden = frame_inputs(5, hidden_of(predictor))
    together = predictor(code0, embed, hidden, streams=streams_of([7, None, 7, 9, -1], [0, 0, 3, 2**40, 1]))
    for row, (seed, offset) in {0: (7, 0), 2: (7, 3), 3: (9, 2**40), 4: (-1, 1)}.items():
        rows = slice(row, row + 1)
        alone = predictor(code0[rows], embed[rows], hidden[rows], streams=streams_of([seed], [offset]))
        assert torch.equal(alone, together[rows])
    order = torch.tensor([4, 3, 2, 1, 0])
    moved = predictor(
        code0[order], embed[order], hidden[order], streams=streams_of([-1, 9, 7, 3, 7], [1, 2**40, 3, 0, 0])
    )
    assert torch.equal(moved[[0, 1, 2, 4]], together[[4, 3, 2, 0]])


def test_seed_and_offset_change_the_codes(predictor):
    code0, embed, hidden = (
        tensor.expand(64, *tensor.shape[1:]) for tensor in frame_inputs(1, hidden_of(predictor))
    )
    by_seed = predictor(code0, embed, hidden, streams=streams_of(list(range(64)), [0] * 64, 64))
    by_offset = predictor(code0, embed, hidden, streams=streams_of([1] * 64, list(range(64)), 64))
    assert len({*map(tuple, by_seed.tolist())}) > 60
    assert len({*map(tuple, by_offset.tolist())}) > 60


def test_padding_rows(predictor):
    """Rows past those packed give code 0 and no sum, and leave the others as they are."""
    code0, embed, hidden = frame_inputs(5, hidden_of(predictor))
    alone = predictor(code0[:3], embed[:3], hidden[:3], streams=streams_of([1, 2, 3], [0, 0, 0]))
    sums = predictor.frame_sum.clone()
    streams = RowStreams(8, "cpu")
    streams.pack([1, 2, 3], [0, 0, 0])
    embed[3:], hidden[3:] = torch.nan, torch.inf
    padded = predictor(code0, embed, hidden, streams=streams.tensor)
    assert torch.equal(padded[:3], alone)
    assert torch.equal(predictor.frame_sum[:3], sums)
    assert not padded[3:, 1:].any()
    assert not predictor.frame_sum[3:].any()


def test_parameters_by_row(predictor):
    code0, embed, hidden = frame_inputs(4, hidden_of(predictor))
    streams = streams_of([1, 2, 3, 4], [0] * 4)
    rows = predictor(
        code0,
        embed,
        hidden,
        streams=streams,
        temperature=torch.tensor([0.9, 0.0, 2.0, 1.0]),
        top_k=torch.tensor([50, 50, 0, 3], dtype=torch.int32),
        top_p=torch.tensor([1.0, 1.0, 0.5, 1.0]),
    )
    numbers = [(0.9, 50, 1.0), (0.0, 50, 1.0), (2.0, 0, 0.5), (1.0, 3, 1.0)]
    for row, (temperature, top_k, top_p) in enumerate(numbers):
        all_rows = predictor(
            code0, embed, hidden, streams=streams, temperature=temperature, top_k=top_k, top_p=top_p
        )
        assert torch.equal(rows[row], all_rows[row])
    greedy = predictor(code0, embed, hidden, streams=streams, do_sample=False)
    assert torch.equal(rows[1], greedy[1])


def test_their_ways_of_seeding_are_theirs(predictor):
    inputs = frame_inputs(3, hidden_of(predictor))

    def generators():
        return [torch.Generator().manual_seed(seed) for seed in (1, 2, 3)]

    ours = predictor(*inputs, generators=generators())
    assert torch.equal(ours, TheirCodePredictor.forward(predictor, *inputs, generators=generators()))
    with pytest.raises(ValueError, match="streams and generators exclude each other"):
        predictor(*inputs, generators=generators(), streams=streams_of([1, 2, 3], [0, 0, 0]))


def test_without_streams_rows_are_unseeded(predictor):
    inputs = frame_inputs(3, hidden_of(predictor))
    first, second = predictor(*inputs), predictor(*inputs)
    assert not torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()


def test_reloaded_weights_are_folded_again_in_place(predictor):
    """A captured graph goes on reading the same tensors."""
    inputs = frame_inputs(3, hidden_of(predictor))
    predictor(*inputs, do_sample=False)
    pointers = [tensor.data_ptr() for tensor in predictor.prepare().weights.tensors()]
    torch.manual_seed(3)
    other = make_predictor(talker_hidden=hidden_of(predictor), **TINY)
    randomise(other, seed=4)
    predictor.load_weights((name, w.detach().clone()) for name, w in other.named_parameters())
    assert [tensor.data_ptr() for tensor in predictor.prepare().weights.tensors()] == pointers
    assert torch.equal(predictor(*inputs, do_sample=False), other(*inputs, do_sample=False))


def test_tables_are_held_once(predictor):
    stacked = predictor.stacked_codec_embedding
    for index, table in enumerate(predictor.get_input_embeddings()):
        assert table.weight.data_ptr() == stacked[index].data_ptr()


def test_more_rows_than_expected(predictor):
    inputs = frame_inputs(21, hidden_of(predictor))
    streams = streams_of(list(range(21)), [0] * 21, 32)
    few = predictor(*(tensor[:8] for tensor in inputs), streams=streams)
    assert predictor.prepare().buffers.rows == 8
    outgrown = weakref.ref(predictor.prepare().buffers)
    many = predictor(*inputs, streams=streams)
    assert torch.equal(many[:8], few)
    assert predictor.prepare().buffers.rows == 32
    gc.collect()
    assert outgrown() is not None, "a graph captured over these buffers would write freed memory"
