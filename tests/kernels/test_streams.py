"""RowStreams and RowParameters: layout, the global stream, what is refused, and the copies."""

import copy
import pickle

import numpy as np
import oracle
import pytest
import torch

from rowseed.kernels import streams
from rowseed.kernels.sampling import sample
from rowseed.kernels.streams import SEEDED, RowParameters, RowStreams, check_seed

CUDA = pytest.mark.gpu


def made(max_rows=8, **kwargs):
    return RowStreams(max_rows, "cpu", **{"global_seed": 99, **kwargs})


def test_layout_and_address():
    rows = made(global_offset=5)
    address = rows.tensor.data_ptr()
    assert rows.tensor.shape == (9, 3)
    assert rows.tensor.dtype == torch.int64
    packed = rows.pack([42, None, 7], [0, 3, 5], 4)
    assert packed.shape == (5, 3)
    assert packed.data_ptr() == rows.tensor.data_ptr() == address
    assert packed[:4].tolist() == [[99, 5, 3], [42, 0, SEEDED], [0, 3, 0], [7, 5, SEEDED]]
    assert rows.pack([1], [2]).data_ptr() == address


def test_example_of_the_readme():
    packed = made().pack(seeds=[42, None, 7], offsets=[0, 3, 5], padded_rows=4)
    codes = sample(torch.randn(4, 2048), packed, temperature=0.9, top_k=50, top_p=1.0, codebook=1)
    assert codes.shape == (4,)
    assert codes[3] == 0


def test_only_lines_in_use_are_copied():
    rows = made()
    rows.tensor[3:] = 12345
    rows.pack([1, 2], [3, 4], 6)
    assert (rows.tensor[3:] == 12345).all()
    assert rows.tensor[:3].tolist() == [[99, 0, 2], [1, 3, 1], [2, 4, 1]]


def test_global_offset_advances_by_padded_rows():
    rows = made(global_offset=2**64 - 3)
    for padded, expected in ((4, -3), (2, 1), (8, 3), (2, 11)):
        assert rows.pack([None, 1], [0, 0], padded)[0].tolist() == [99, expected, 2]


def test_unseeded_rows_never_meet():
    """Every (step, row) of the global stream has a counter of its own."""
    rows = made()
    used = []
    for padded in (3, 5, 3):
        packed = rows.pack([None] * 3, [7] * 3, padded)
        used += [int(packed[0, 1]) + row for row in range(3)]
    assert len(set(used)) == len(used)


@pytest.mark.parametrize(
    ("seed", "stored"),
    [(0, 0), (-1, -1), (2**64 - 1, -1), (2**63, -(2**63)), (-(2**63), -(2**63)), (2**63 - 1, 2**63 - 1),
     (np.int64(-5), -5), (np.uint64(2**64 - 5), -5)],
)  # fmt: skip
def test_seeds_at_the_edges(seed, stored):
    assert check_seed(seed) == stored
    assert made().pack([seed, None], [0, 0])[1].tolist() == [stored, 0, SEEDED]


def test_zero_and_negative_seeds_are_streams_of_their_own():
    logits = torch.zeros(5, 4096)
    codes = sample(logits, made().pack([0, -1, 1, None, -2], [0] * 5))
    assert len(set(codes.tolist())) == 5


@pytest.mark.parametrize("seed", [True, np.bool_(False), 1.0, np.float32(3), "7", b"7", [7], float("nan")])
def test_seeds_that_are_no_integers(seed):
    with pytest.raises(TypeError, match=r"tts_local_seed must be an int in \[-2\*\*63, 2\*\*64\), got "):
        check_seed(seed, "tts_local_seed")
    rows = made()
    with pytest.raises(TypeError, match=r"seeds\[1\] must be an int"):
        rows.pack([5, seed], [0, 0])
    assert rows.global_offset == 0
    assert (rows.tensor == 0).all()


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 10**30])
def test_seeds_out_of_range(seed):
    with pytest.raises(ValueError, match=rf"seed must be an int in \[-2\*\*63, 2\*\*64\), got {seed}"):
        check_seed(seed)
    with pytest.raises(ValueError, match=r"seeds\[0\] must be an int"):
        made().pack([seed], [0])


@pytest.mark.parametrize(
    "offsets", [[2**64 - 1, -(2**63)], np.array([-1, -(2**63)]), np.array([2**64 - 1, 2**63], np.uint64)]
)
def test_offsets_are_any_sixty_four_bits(offsets):
    assert made().pack([1, None], offsets)[1:, 1].tolist() == [-1, -(2**63)]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1, 2], [0]), ValueError, "offsets must have one value a seed, 2, got 1"),
        (([1], [0.5]), TypeError, r"offsets\[0\] must be an int"),
        (([1], np.array([0.5])), TypeError, r"offsets\[0\] must be an int"),
        (([1], [True]), TypeError, r"offsets\[0\] must be an int"),
        (([1, 2], [0, 0], 1), ValueError, r"padded_rows must be in \[2, 8\] for 2 seeds .* got 1"),
        (([1], [0], 9), ValueError, r"padded_rows must be in \[1, 8\] for 1 seeds .* got 9"),
        (([1] * 9, [0] * 9), ValueError, "padded_rows must be in .* for 9 seeds and max_rows 8"),
        ((torch.tensor([1]), [0]), TypeError, r"seeds must be .* got a tensor: give seeds.tolist\(\)"),
        (([1], torch.tensor(0)), TypeError, r"offsets must be .* got a tensor: give offsets.tolist\(\)"),
        (([1], np.zeros((1, 2), int)), ValueError, r"offsets must have one dimension, got shape \[1, 2\]"),
        ((np.zeros((1, 1), int), [0]), ValueError, r"seeds must have one dimension, got shape \[1, 1\]"),
        (([1], [0], 4.0), TypeError, "padded_rows must be an int, got 4.0"),
    ],
)
def test_packs_that_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        made().pack(*arguments)


@pytest.mark.parametrize("max_rows", [0, -1, True, 4.0])
def test_max_rows_is_refused_by_value(max_rows):
    for kind in (RowStreams, RowParameters):
        with pytest.raises(ValueError, match=f"max_rows must be an int of at least 1, got {max_rows}"):
            kind(max_rows, "cpu")


def test_empty_batch():
    assert made().pack([], [], 3).tolist()[0] == [99, 0, 0]


def test_global_seed_is_derived_from_the_torch_seed(monkeypatch):
    """Two Philox words of (rank, number made before) under the torch seed, from an independent Philox."""
    torch_seed = 0x1234_5678_9ABC_DEF0
    monkeypatch.setattr(torch, "initial_seed", lambda: torch_seed)
    monkeypatch.setattr(streams, "_made", iter(range(7, 99)))
    for made_before, rank in ((7, 0), (8, 3)):
        low, high, *_ = oracle.philox((rank, made_before, 0, 1 << 24 | 2 << 16), (0x9ABCDEF0, 0x12345678))
        expected = int(high) << 32 | int(low)
        assert RowStreams(1, "cpu", rank=rank).global_seed % 2**64 == expected


def test_two_runners_and_two_ranks_do_not_meet():
    torch.manual_seed(0)
    seeds = {RowStreams(1, "cpu", rank=rank).global_seed for rank in (0, 0, 1, 2)}
    assert len(seeds) == 4


def test_given_global_seed_is_kept():
    assert RowStreams(1, "cpu", global_seed=2**64 - 1).global_seed == -1
    with pytest.raises(TypeError, match="global_seed must be an int"):
        RowStreams(1, "cpu", global_seed=1.5)


class Event:
    """A copy that finishes only when somebody waits for it."""

    def __init__(self):
        self.waited = 0

    def synchronize(self):
        self.waited += 1


def test_a_buffer_is_not_written_while_its_copy_may_run():
    """Four packs in flight use four buffers; the fifth waits for the first copy alone."""
    mirror = streams._Mirror((3, 3), torch.int64, torch.device("cpu"))
    mirror._hosts = [torch.zeros(3, 3, dtype=torch.int64) for _ in range(4)]
    mirror._views = [host.numpy() for host in mirror._hosts]
    mirror._copied = [Event() for _ in range(4)]
    in_flight = []
    for step in range(4):
        buffer = mirror.next_buffer()
        buffer[:] = step
        in_flight.append(buffer)
        events = [event.waited for event in mirror._copied]
    assert [int(buffer[0, 0]) for buffer in in_flight] == [0, 1, 2, 3]
    assert events == [1, 1, 1, 1]
    mirror.next_buffer()
    assert sorted(event.waited for event in mirror._copied) == [1, 1, 1, 2]
    assert mirror.next_buffer() is in_flight[1]


def test_parameters_start_at_the_defaults():
    parameters = RowParameters(3, "cpu")
    assert parameters.temperature.tolist() == [pytest.approx(0.9)] * 3
    assert parameters.top_k.tolist() == [50] * 3
    assert parameters.top_p.tolist() == [1.0] * 3
    assert (parameters.temperature.dtype, parameters.top_k.dtype) == (torch.float32, torch.int32)


def test_parameters_are_packed_in_place():
    parameters = RowParameters(4, "cpu", temperature=0.5, top_k=7, top_p=0.25)
    addresses = [getattr(parameters, n).data_ptr() for n in ("temperature", "top_k", "top_p")]
    parameters.pack([0.1, 0], [2**40, -1], [0.3, 1])
    assert torch.equal(parameters.temperature, torch.tensor([0.1, 0.0, 0.5, 0.5]))
    assert parameters.top_k.tolist() == [2**31 - 1, 0, 7, 7]
    assert torch.equal(parameters.top_p, torch.tensor([0.3, 1.0, 0.25, 0.25]))
    assert addresses == [getattr(parameters, n).data_ptr() for n in ("temperature", "top_k", "top_p")]


def test_filling_sends_nothing_twice(monkeypatch):
    parameters = RowParameters(5, "cpu", temperature=0.5, top_k=7, top_p=0.25)
    columns = (parameters.temperature, parameters.top_k, parameters.top_p)
    start, sent = [column.clone() for column in columns], []
    push = parameters._mirror.push
    monkeypatch.setattr(parameters._mirror, "push", lambda lines: sent.append(lines) or push(lines))
    parameters.fill(0.5, 7, 0.25)
    assert sent == []
    parameters.pack([1.0] * 4, [1] * 4, [1.0] * 4)
    parameters.pack([2.0], [2], [0.5])
    parameters.fill(0.5, 7, 0.25)
    parameters.fill(0.5, 7, 0.25)
    assert sent == [4, 1, 5]
    assert all(map(torch.equal, columns, start))
    with pytest.raises(ValueError, match="top_p"):
        parameters.fill(0.5, 7, 2.0)
    parameters.fill(0.5, 8, 0.25)
    assert sent == [4, 1, 5, 5] and parameters.top_k.tolist() == [8] * 5


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([-1.0], [1], [1.0]), ValueError, r"temperature\[0\] must be in \[0, 3.4028235e\+38\], got .*-1"),
        (([1.0, float("nan")], [1, 1], [1, 1]), ValueError, r"temperature\[1\] must be in .*nan"),
        (([1.0], [1], [1.5]), ValueError, r"top_p\[0\] must be in \[0, 1\], got .*1.5"),
        (([1.0], [1.5], [1.0]), TypeError, r"top_k\[0\] must be an int"),
        ((["1"], [1], [1.0]), TypeError, "temperature must be numbers"),
        (([True], [1], [1.0]), TypeError, "temperature must be numbers"),
        (([1.0], [1, 2], [1.0]), ValueError, "top_k must have one value a temperature, 1, got 2"),
        (([1.0] * 5, [1] * 5, [1.0] * 5), ValueError, "temperature must have at most 4 values, got 5"),
    ],
)
def test_parameters_that_are_refused(arguments, error, message):
    parameters = RowParameters(4, "cpu")
    before = parameters.temperature.clone()
    with pytest.raises(error, match=message):
        parameters.pack(*arguments)
    assert torch.equal(parameters.temperature, before)


def test_parameters_reach_the_sampler(backend):
    parameters = RowParameters(4, "cpu")
    parameters.pack([0.7, 0.0, 1.3], [0, 5, 3], [0.8, 1.0, 0.5])
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(1))
    packed = made().pack([1, 2, 3], [4, 5, 6])
    columns = [t[:3] for t in (parameters.temperature, parameters.top_k, parameters.top_p)]
    codes = backend.sample(logits, packed, temperature=columns[0], top_k=columns[1], top_p=columns[2])
    for row, (t, k, p) in enumerate([(0.7, 0, 0.8), (0.0, 5, 1.0), (1.3, 3, 0.5)]):
        alone = made().pack([row + 1], [row + 4])
        assert codes[row] == sample(logits[row : row + 1], alone, temperature=t, top_k=k, top_p=p)


@CUDA
def test_packs_in_a_burst_arrive_in_order():
    rows = RowStreams(64, "cuda", global_seed=1)
    torch.cuda._sleep(10_000_000)
    seen = []
    for step in range(32):
        seen.append(rows.pack(list(range(step, step + 64)), [step] * 64).clone())
    for step, packed in enumerate(seen):
        assert packed[1:, 0].tolist() == list(range(step, step + 64))
        assert packed[1:, 1].tolist() == [step] * 64


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda rows: pickle.loads(pickle.dumps(rows)),
    "in a module": lambda rows: copy.deepcopy({"model": [rows, rows.tensor]})["model"][0],
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_packs_and_draws_what_the_original_would(copied):
    original = made(global_offset=2**63 - 2)
    original.pack([1, None], [2, 3])
    other = copied(original)
    assert torch.equal(other.tensor, original.tensor)
    assert other.tensor.data_ptr() != original.tensor.data_ptr()
    logits = torch.randn(3, 512, generator=torch.Generator().manual_seed(1))
    before = original.tensor.clone()
    codes = sample(logits, other.pack([5, None, 6], [7, 8, 9]))
    assert torch.equal(original.tensor, before)
    assert len(set(codes.tolist())) == 3
    assert codes.tolist() == sample(logits, original.pack([5, None, 6], [7, 8, 9])).tolist()
    assert other.global_offset == original.global_offset


@pytest.mark.parametrize("copied", list(COPIES.values())[:3], ids=list(COPIES)[:3])
@pytest.mark.parametrize("packed", [False, True], ids=["filled", "packed"])
def test_a_copy_of_parameters_is_read_by_its_columns(copied, packed):
    original = RowParameters(3, "cpu", temperature=0.5, top_k=7, top_p=0.25)
    if packed:
        original.pack([0.0], [1], [0.75])
    names = "temperature", "top_k", "top_p"
    other = copied(original)
    assert all(torch.equal(getattr(other, name), getattr(original, name)) for name in names)
    kept = [getattr(original, name).clone() for name in names]
    other.fill(0.9, 50, 1.0)
    other.pack([2.0], [3], [0.5])
    assert [getattr(other, name).tolist() for name in names] == [
        [2.0, *[pytest.approx(0.9)] * 2],
        [3, 50, 50],
        [0.5, 1.0, 1.0],
    ]
    assert all(map(torch.equal, kept, (getattr(original, name) for name in names)))
    again = copied(original)
    again.fill(0.5, 7, 0.25)
    assert again.temperature.tolist() == [0.5] * 3, "the copy must know that a row was packed since"


def test_repack_sends_nothing_once_where_the_rows_are_those_that_were_packed_last():
    rows = RowStreams(4, "cpu", global_seed=1)
    seeds, offsets = [7, None, 9], [1, 2, 3]
    lines = rows.pack(seeds, offsets).clone()
    at = rows.global_offset
    assert torch.equal(rows.repack(list(seeds), np.array(offsets), 4)[:4], lines)
    assert rows.global_offset == at
    again = rows.repack(seeds, offsets)
    assert rows.global_offset == at + 3 and again[0, 1] == at
    assert torch.equal(again[1:], lines[1:])
    rows.repack(seeds, offsets)
    assert rows.global_offset == at + 6


@pytest.mark.parametrize(
    ("seeds", "offsets"),
    [([7, None], [1, 3]), ([7, 8], [1, 2]), ([None, 7], [1, 2]), ([7], [1]), ([7, None, 7], [1, 2, 3])],
)
def test_repack_sends_other_rows(seeds, offsets):
    rows, fresh = RowStreams(4, "cpu", global_seed=1), RowStreams(4, "cpu", global_seed=1, global_offset=2)
    rows.pack([7, None], [1, 2])
    assert torch.equal(rows.repack(seeds, offsets), fresh.pack(seeds, offsets))


def test_repack_refuses_what_pack_refuses():
    rows = RowStreams(2, "cpu")
    for seeds, offsets, padded_rows in (
        ([True], [1], None),
        ([1], [1], 3),
        ([1], [1, 2], None),
        ([1], [1], True),
    ):
        rows.pack([1], [1])
        with pytest.raises((TypeError, ValueError)):
            rows.repack(seeds, offsets, padded_rows)
