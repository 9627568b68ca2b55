"""``sample`` on every backend: golden codes, invariance, the epilogue, inactive rows, refusals, the op."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import library

from rowseed.kernels import cpu, fused
from rowseed.kernels.sampling import Gather, sample
from rowseed.kernels.streams import INACTIVE, SEEDED, RowStreams

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden_scheme1.json").read_text())
POISON = -77


def golden_logits(spec):
    if isinstance(spec, list):
        return torch.tensor([float(x) for x in spec], dtype=torch.float32)
    i = torch.arange(spec["V"])
    grid = (i * spec["a"] + spec["b"]) % spec["m"] - spec["m"] // 2
    return (grid.double() / spec["d"] + spec.get("shift", 0)).float()


def golden_batch(lines, rows):
    """Streams and per-row parameters of golden rows that share a codebook and a global stream."""

    def column(name, default, dtype):
        return torch.tensor([float(row.get(name, default)) for row in rows]).to(dtype)

    streams = lines(
        *((row.get("seed"), row.get("offset", 0)) for row in rows),
        global_seed=rows[-1].get("global_seed", 0),
        global_offset=rows[-1].get("global_offset", 0),
    )
    return streams, dict(
        temperature=column("temperature", 0.9, torch.float32),
        top_k=column("top_k", 50, torch.int64),
        top_p=column("top_p", 1.0, torch.float32),
        codebook=rows[-1].get("codebook", 1),
    )


def check_golden(backend, lines, logits, rows, checked=slice(None)):
    streams, parameters = golden_batch(lines, rows)
    status = torch.full((len(rows),), POISON, dtype=torch.int32)
    codes = backend.sample(logits.expand(len(rows), -1), streams, status=status, **parameters)
    assert codes.tolist()[checked] == [row["code"] for row in rows][checked]
    assert status.tolist()[checked] == [row["status"] for row in rows][checked]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_golden_mixed_batches(backend, lines, case):
    """All rows of a case at once, parameters from per-row tensors."""
    logits = golden_logits(case["logits"])
    for codebook in {row.get("codebook", 1) for row in case["rows"]}:
        rows = [r for r in case["rows"] if r.get("codebook", 1) == codebook and "seed" in r]
        if rows:
            check_golden(backend, lines, logits, rows)
    for row in case["rows"]:
        if "seed" not in row:
            # Unseeded rows are addressed by their place in the batch: fill the places before it.
            before = [dict(row, temperature=0.0)] * row["row"]
            check_golden(backend, lines, logits, [*before, row], checked=slice(-1, None))


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_golden_row_by_row(backend, lines, case):
    """One row a call, parameters as numbers where the host accepts them; the interpreter takes a few."""
    logits = golden_logits(case["logits"])
    rows = [row for row in case["rows"] if "seed" in row]
    for row in rows[:: max(len(rows) // 4, 1)] if backend.slow else rows:
        temperature, top_p = float(row.get("temperature", 0.9)), float(row.get("top_p", 1.0))
        if row["status"] & 8:
            temperature, top_p = torch.tensor([temperature]), torch.tensor([top_p])
        status = torch.full((1,), POISON, dtype=torch.int32)
        code = backend.sample(
            logits[None],
            lines((row["seed"], row.get("offset", 0))),
            temperature=temperature,
            top_k=row.get("top_k", 50),
            top_p=top_p,
            codebook=row.get("codebook", 1),
            status=status,
        )
        assert (int(code), int(status)) == (row["code"], row["status"]), row


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_golden_in_sixteen_bits(backend, lines, dtype):
    (case,) = [c for c in GOLDEN["cases"] if str(dtype).removeprefix("torch.") in c.get("exact_in", ())]
    check_golden(backend, lines, golden_logits(case["logits"]).to(dtype), case["rows"])


def batch(rows=9, V=261, dtype=torch.float32, C=None):
    generator = torch.Generator().manual_seed(rows)
    shape = (rows, V) if C is None else (rows, C, V)
    return (torch.randn(shape, generator=generator) * 3).to(dtype)


FILTERS = dict(temperature=0.8, top_k=40, top_p=0.9, codebook=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_row_alone_is_the_row_anywhere(backend, lines, dtype):
    """Alone; at every place of a batch of nine beside unseeded, NaN and unused rows."""
    row = batch(1, dtype=dtype)
    alone = int(backend.sample(row, lines((42, 5)), **FILTERS))
    for place in range(9):
        logits = batch(dtype=dtype)
        logits[place] = row
        logits[(place + 1) % 9] = math.nan
        streams = [(1000 + i if i % 2 else None, i) for i in range(9)]
        streams[place] = (42, 5)
        codes = backend.sample(logits, lines(*streams, in_use=max(place + 1, 7)), **FILTERS)
        assert int(codes[place]) == alone
        assert int(codes[(place + 1) % 9]) == 0
    assert alone > 0


def test_another_seed_offset_or_codebook_is_another_code(backend, lines):
    """What the invariance tests would miss if the stream did not matter."""
    row = torch.zeros(1, 4000)
    codes = [int(backend.sample(row, lines(address), codebook=c)) for address, c in [
        ((42, 5), 3), ((43, 5), 3), ((42, 6), 3), ((42, 5), 4), ((None, 5), 3), ((42 + 2**32, 5), 3),
    ]]  # fmt: skip
    assert len(set(codes)) == len(codes)


def test_a_permuted_batch_gives_permuted_codes(backend, lines):
    logits = batch()
    addresses = [(i * 7919, i) for i in range(9)]
    codes = backend.sample(logits, lines(*addresses), **FILTERS)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(4))
    permuted = backend.sample(logits[order], lines(*(addresses[i] for i in order.tolist())), **FILTERS)
    assert torch.equal(permuted, codes[order])
    assert len(set(codes.tolist())) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codebooks_in_one_call_equal_a_call_each(backend, lines, dtype):
    logits = batch(3, C=4, dtype=dtype)
    streams = lines((1, 0), (None, 0), (3, 9), global_seed=8, global_offset=2)
    temperature = torch.tensor([0.7, 1.0, 0.0])
    kwargs = dict(temperature=temperature, top_k=30, top_p=0.95)
    status = torch.full((3, 4), POISON, dtype=torch.int32)
    together = backend.sample(logits, streams, codebook=5, status=status, **kwargs)
    assert status.tolist() == [[0] * 4] * 3
    for c in range(4):
        single = backend.sample(logits[:, c], streams, codebook=5 + c, **kwargs)
        assert torch.equal(together[:, c], single)


def test_strided_logits_and_outputs(backend, lines):
    logits = batch(4)
    streams = lines((1, 0), (None, 0), (3, 9), (-4, 1))
    codes = backend.sample(logits, streams, **FILTERS)
    wide = torch.full((4, 700), math.nan)
    wide[:, 13 : 13 + 261] = logits
    frame = torch.full((4, 16), POISON, dtype=torch.int64)
    status = torch.full((4, 2), POISON, dtype=torch.int32)
    columns = dict(out=frame[:, 6], status=status[:, 1])
    given = backend.sample(wide[:, 13 : 13 + 261], streams, **columns, **FILTERS)
    assert torch.equal(given, codes)
    assert torch.equal(frame[:, 6], codes)
    assert (frame[:, [*range(6), *range(7, 16)]] == POISON).all()
    assert status.tolist() == [[POISON, 0]] * 4


@pytest.mark.parametrize("V", [1, 2, 3, 5, 31, 127, 1000, 3073])
def test_awkward_vocabularies_agree(lines, triton_backend, V):
    logits = batch(2, V=V)
    streams = lines((11, 2), (None, 0))
    for kwargs in (dict(top_k=V // 2), dict(top_p=0.7), dict(top_k=V + 3, top_p=0.0)):
        expected = sample(logits, streams, **kwargs)
        assert torch.equal(triton_backend.sample(logits, streams, **kwargs), expected)
        assert (expected < V).all()


@pytest.mark.parametrize(("V", "dtype"), [(8193, torch.float32), (20000, torch.bfloat16)])
def test_wide_vocabularies_agree(lines, triton_backend, V, dtype):
    """Past one block: a NaN and ties across chunks, every filter, a greedy row."""
    logits = batch(3, V=V, dtype=dtype)
    logits[0, V - 1], logits[1, 5] = math.inf, math.nan
    streams = lines((11, 2), (None, 0), (13, 4))
    kwargs = dict(
        temperature=torch.tensor([1.0, 0.6, 0.0]),
        top_k=torch.tensor([0, 300, 7]),
        top_p=torch.tensor([0.8, 0.9, 1.0]),
    )
    expected_status = torch.zeros(3, dtype=torch.int32)
    status = torch.full((3,), POISON, dtype=torch.int32)
    expected = sample(logits, streams, status=expected_status, **kwargs)
    assert torch.equal(triton_backend.sample(logits, streams, status=status, **kwargs), expected)
    assert expected_status.tolist() == status.tolist() == [2, 1, 0]
    assert expected[0] == V - 1


def epilogue(rows, V, D=10, E=6, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(V, D, generator=generator).to(dtype)
    next_table = torch.randn(V, E, generator=generator).to(dtype)
    total = torch.randn(rows, D, generator=generator)
    steps = torch.full((rows, 3, E), float(POISON), dtype=dtype)
    return Gather(table, total, next_table, steps[:, 1]), steps


def test_gather_adds_and_gathers(backend, lines):
    logits = batch(5)
    streams = lines(*((i, i) for i in range(4)), (9, 9), in_use=4)
    streams[2, 2] |= INACTIVE
    gather, steps = epilogue(5, 261)
    before = gather.total.clone()
    codes = backend.sample(logits, streams, gather=gather, **FILTERS)
    for row in (0, 2, 3):
        assert torch.equal(gather.total[row], before[row] + gather.table[codes[row]].float())
        assert torch.equal(gather.next_input[row], gather.next_table[codes[row]])
    for row in (1, 4):
        assert torch.equal(gather.total[row], before[row])
        assert (steps[row] == POISON).all()
    assert (steps[:, [0, 2]] == POISON).all()
    assert (codes[[0, 2, 3]] > 0).any()
    assert (codes[[1, 4]] == 0).all()


def test_gather_without_a_next_step(backend, lines):
    gather, _ = epilogue(2, 261, D=1030, dtype=torch.float32)
    last = Gather(gather.table, gather.total)
    before = gather.total.clone()
    codes = backend.sample(batch(2), lines((1, 1), (2, 2)), gather=last)
    assert torch.equal(last.total, before + gather.table[codes])


def test_inactive_rows_get_code_zero_and_nothing_else(backend, lines):
    """Poison everywhere: NaN logits, absurd parameters, sentinel outputs."""
    logits = batch(4)
    logits[1:] = math.nan
    streams = lines((5, 5), (6, 6), (7, 7), (8, 8), in_use=3)
    streams[2, 2] |= INACTIVE
    streams[3, 2] = INACTIVE
    out = torch.full((4,), POISON)
    status = torch.full((4,), POISON, dtype=torch.int32)
    kwargs = dict(
        temperature=torch.tensor([0.8, math.nan, -1.0, math.inf]),
        top_k=torch.tensor([40, 2**62, -5, 7]),
        top_p=torch.tensor([0.9, math.nan, 3.0, 0.5]),
    )
    backend.sample(logits, streams, out=out, status=status, codebook=3, **kwargs)
    assert out.tolist()[1:] == [0, 0, 0]
    assert status.tolist() == [0, POISON, POISON, POISON]
    assert out[0] == sample(logits[:1], lines((5, 5)), temperature=0.8, top_k=40, top_p=0.9, codebook=3)


def test_status_on_sampled_and_greedy_rows(backend, lines):
    inf, nan = math.inf, math.nan
    logits = torch.tensor([[nan, 1, 2], [inf, 0, nan], [-inf, -inf, -inf], [nan] * 3, [0, 1, 2], [0, 1, 2]])
    expected = [1, 3, 4, 5, 8, 0]
    for temperature in (1.0, 0.0):
        status = torch.full((6,), POISON, dtype=torch.int32)
        top_p = torch.tensor([1.0, 1.0, 1.0, 1.0, nan, 0.5])
        codes = backend.sample(
            logits, lines(*((i, 0) for i in range(6))), temperature=temperature, top_p=top_p, status=status
        )
        assert status.tolist() == expected
        assert codes[1] == 0
        assert codes[2] == codes[3] == 0
        assert codes[4] == 2


def test_nothing_to_draw(backend, lines):
    assert backend.sample(torch.zeros(0, 7), lines()).shape == (0,)
    assert backend.sample(torch.zeros(2, 0, 7), lines((1, 1), (2, 2))).shape == (2, 0)


LOGITS, LINES = torch.zeros(2, 8), torch.tensor([[0, 0, 2], [1, 0, 1], [2, 0, 1]])
REFUSED = [
    (dict(logits=[[0.0]]), TypeError, "logits must be a tensor, got list"),
    (dict(logits=torch.zeros(8)), ValueError, r"logits must have shape \[B, V\] or \[B, C, V\], got \[8\]"),
    (dict(logits=LOGITS.double()), TypeError, "logits must be float32, .* got torch.float64"),
    (dict(logits=torch.zeros(2, 0)), ValueError, r"logits must have 1 <= V < 2\*\*31 tokens, got \[2, 0\]"),
    (dict(logits=torch.zeros(8, 2).T), ValueError, r"logits must have a last stride of 1, got strides"),
    (dict(streams=LINES.int()), TypeError, "streams must be int64, got torch.int32"),
    (dict(streams=LINES[:2]), ValueError, r"streams must have shape \[N, 3\] with N >= 3, got \[2, 3\]"),
    (dict(streams=torch.zeros(3, 4).long()[:, :3]), ValueError, "streams must be contiguous"),
    (dict(streams=LINES.to("meta")), ValueError, "streams must be on the logits' device cpu, got meta"),
    (dict(temperature=-0.1), ValueError, r"temperature must be in \[0, 3.4028235e\+38\], got -0.1"),
    (dict(temperature=math.nan), ValueError, "temperature must be in .*, got nan"),
    (dict(temperature=1e39), ValueError, r"temperature must be in .*, got 1e\+39"),
    (dict(temperature=True), TypeError, "temperature must be a number or a float32 .* got True"),
    (dict(temperature="1"), TypeError, "temperature must be a number or a float32 .* got '1'"),
    (dict(temperature=torch.ones(3)), ValueError, r"temperature must have shape \[2\], got \[3\]"),
    (dict(temperature=torch.tensor(1.0)), ValueError, r"temperature must have shape \[2\], got \[\]"),
    (dict(temperature=torch.ones(2).double()), TypeError, "temperature must be float32, got torch.float64"),
    (dict(top_k=1.5), TypeError, "top_k must be an integer, got 1.5"),
    (dict(top_k=False), TypeError, "top_k must be an integer, got False"),
    (dict(top_k=torch.ones(2)), TypeError, "top_k must be int32 or int64, got torch.float32"),
    (dict(top_k=torch.ones(1).int()), ValueError, r"top_k must have shape \[2\], got \[1\]"),
    (dict(top_p=1.01), ValueError, r"top_p must be in \[0, 1\], got 1.01"),
    (dict(top_p=-1), ValueError, r"top_p must be in \[0, 1\], got -1"),
    (dict(top_p=None), TypeError, "top_p must be a number or a float32 .* got None"),
    (dict(top_p=torch.ones(2).half()), TypeError, "top_p must be float32, got torch.float16"),
    (dict(codebook=-1), ValueError, r"codebook must be in \[0, 65535\] for 1 .* got -1"),
    (dict(codebook=65536), ValueError, r"codebook must be in \[0, 65535\] for 1 .* got 65536"),
    (dict(logits=torch.zeros(2, 3, 8), codebook=65534), ValueError, r"must be in \[0, 65533\] for 3"),
    (dict(codebook=1.0), TypeError, "codebook must be an integer, got 1.0"),
    (dict(out=torch.zeros(2).int()), TypeError, "out must be int64, got torch.int32"),
    (dict(out=torch.zeros(2, 1).long()), ValueError, r"out must have shape \[2\], got \[2, 1\]"),
    (dict(status=torch.zeros(2).long()), TypeError, "status must be int32, got torch.int64"),
    (dict(backend="cuda"), ValueError, "backend must be None, 'triton', 'numba' or 'torch', got 'cuda'"),
    (
        dict(logits=LOGITS.to("meta"), streams=LINES.to("meta"), backend="numba"),
        ValueError,
        "backend must be 'triton' or 'torch' for tensors on meta, got 'numba'",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED, ids=[r[2][:48] for r in REFUSED])
def test_refusals(change, error, message):
    arguments = dict(logits=LOGITS, streams=LINES) | change
    with pytest.raises(error, match=message):
        sample(**arguments)


GATHER = Gather(torch.zeros(8, 4), torch.zeros(2, 4), torch.zeros(8, 6), torch.zeros(2, 6))
REFUSED_GATHERS = [
    (dict(table=torch.zeros(7, 4)), ValueError, r"gather.table must have shape \[>= 8, D\], got \[7, 4\]"),
    (dict(table=torch.zeros(8, 4).int()), TypeError, "gather.table must be float32 or float16 or bfloat16"),
    (dict(total=torch.zeros(2, 5)), ValueError, r"gather.total must have shape \[2, 4\], got \[2, 5\]"),
    (dict(total=torch.zeros(2, 4).half()), TypeError, "gather.total must be float32, got torch.float16"),
    (dict(total=torch.zeros(4, 2).T), ValueError, "gather.total must have a last stride of 1"),
    (dict(next_table=None), ValueError, "gather.next_table and gather.next_input must come together"),
    (dict(next_input=torch.zeros(2, 6).half()), TypeError, "gather.next_input must be float32, got"),
    (dict(next_input=torch.zeros(1, 6)), ValueError, r"gather.next_input must have shape \[2, 6\]"),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED_GATHERS)
def test_gather_refusals(change, error, message):
    with pytest.raises(error, match=message):
        sample(LOGITS, LINES, gather=GATHER._replace(**change))


def test_gather_takes_one_code_a_row():
    with pytest.raises(ValueError, match=r"gather needs logits of shape \[B, V\], got \[2, 1, 8\]"):
        sample(LOGITS[:, None], LINES, gather=GATHER)


def test_triton_on_the_cpu_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(fused, "INTERPRETED", False)
    with pytest.raises(
        ValueError, match=r"must be 'numba' or 'torch' for CPU tensors, got 'triton'.*INTERPRET"
    ):
        sample(LOGITS, LINES, backend="triton")


@pytest.mark.parametrize(("offset", "first"), [(13624304, 2), (33678973, 0)])
def test_equal_scores_go_to_the_lowest_id(backend, lines, offset, first):
    """Offsets of seed 7 (found by search) at which tokens `first` and `first` + 1 draw the largest noise."""
    logits = torch.zeros(1, 4)
    assert backend.sample(logits, lines((7, offset)), codebook=1).tolist() == [first]
    logits[0, first] = -math.inf
    assert backend.sample(logits, lines((7, offset)), codebook=1).tolist() == [first + 1]


def test_numba_compiles_once_whatever_the_strides(lines):
    """A compilation for other strides would come in the middle of serving."""
    wide, streams = torch.randn(6, 70), lines((1, 0), (2, 0))
    for logits in (wide[:2, :64], wide[::3, :64], wide[:2, :64].contiguous(), wide[:1, :64].expand(2, -1)):
        for out in (torch.zeros(2).long(), torch.zeros(2, 15).long()[:, 3]):
            sample(logits, streams, out=out, backend="numba")
    sample(
        wide[:1], lines((1, 0)), temperature=torch.ones(1), top_k=torch.ones(3).int()[::3], backend="numba"
    )
    assert len(cpu._sample.signatures) == 1


def test_number_parameters_are_rounded_to_float32_first(backend, lines):
    """0.8 as a number and as a float32 tensor: one bar, where float64(0.8) would give another."""
    (case,) = [c for c in GOLDEN["cases"] if c["name"] == "top_p is a float32"]
    logits = golden_logits(case["logits"]).expand(8, -1)
    streams = lines(*((1000 + i, i) for i in range(8)))
    numbers = backend.sample(logits, streams, temperature=0.9, top_p=0.8)
    tensors = dict(temperature=torch.full((8,), 0.9), top_p=torch.full((8,), 0.8))
    assert torch.equal(numbers, backend.sample(logits, streams, **tensors))


def test_torch_compile_sees_one_opaque_op():
    rows = RowStreams(4, "cpu", global_seed=1)
    streams = rows.pack([42, None, 7], [0, 3, 5], 4)
    gather, _ = epilogue(4, 261)

    def frame(logits, temperature, codes, total, next_input):
        first = sample(logits * 2, streams, temperature=0.9, top_k=50, codebook=1)
        step = Gather(gather.table, total, gather.next_table, next_input)
        filters = dict(temperature=temperature, top_p=0.9, codebook=2)
        second = sample(logits, streams, out=codes[:, 1], gather=step, **filters)
        return first + second, total * 2

    def arguments():
        codes = torch.full((4, 3), POISON)
        return batch(4), torch.full((4,), 0.7), codes, torch.ones(4, 10), gather.next_input * 1

    eager, compiled = arguments(), arguments()
    expected = frame(*eager)
    results = torch.compile(frame, fullgraph=True)(*compiled)
    for ours, theirs in zip((*results, *compiled), (*expected, *eager), strict=True):
        assert torch.equal(ours, theirs)
    assert (eager[2][:3, 1] != POISON).all()


def test_op_registration():
    streams = torch.tensor([[0, 0, 2], [1, 0, SEEDED], [2, 0, SEEDED]])
    arguments = (
        batch(2), streams, 0.9, None, 50, None, 1.0, torch.tensor([0.9, 1.0]), 0.0, torch.tensor([0.1, 0.0]),
        1, torch.zeros(2).long(), torch.zeros(2).int(), torch.zeros(2), torch.ones(261, 4), torch.zeros(2, 4),
        None, None, "torch",
    )  # fmt: skip
    library.opcheck(torch.ops.rowseed.sample.default, arguments)
