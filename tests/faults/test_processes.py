"""Several processes: tensor-parallel ranks, data-parallel replicas, a stream that moves between processes.

Each process is a real one. Those of a tensor-parallel group meet over gloo afterwards, only to compare what
each of them drew by itself.
"""

import json
import os
import subprocess
import sys
import textwrap

import pytest

LOGITS = """
import json, os, sys
import torch
from rowseed.kernels.sampling import sample
from rowseed.kernels.streams import RowStreams

torch.set_num_threads(1)
# What every worker of one deployment does before it makes its streams: the same seed, on each rank.
torch.manual_seed(int(os.environ.get("MODEL_SEED", "0")))

FRAMES, ROWS, CODEBOOKS, VOCABULARY = 4, 3, 15, 64

def logits(frame):
    generator = torch.Generator().manual_seed(frame)
    return torch.randn(ROWS, CODEBOOKS, VOCABULARY, generator=generator)

def frames(streams, seeds, first=0, count=FRAMES):
    out = []
    for frame in range(first, first + count):
        lines = streams.pack(seeds, [frame] * ROWS)
        out.append(sample(logits(frame), lines, top_k=50, codebook=1).tolist())
    return out
"""


def run(body, *, processes=1, **environment):
    """Runs `body` after LOGITS in separate processes; returns the JSON value that each printed."""
    script = LOGITS + textwrap.dedent(body)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": str(processes)}
            | {name: str(value) for name, value in environment.items()},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    outputs = []
    try:
        for process in started:
            outputs.append(process.communicate(timeout=120)[0])
            assert process.returncode == 0
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [json.loads(output) for output in outputs]


DRAW = """
streams = RowStreams(ROWS, "cpu", rank=int(os.environ.get("DATA_PARALLEL_RANK", "0")))
codes = frames(streams, [7, None, 2**63])
"""


def seeded(codes):
    return [[frame[0], frame[2]] for frame in codes]


def unseeded(codes):
    return [frame[1] for frame in codes]


def test_two_tensor_parallel_ranks_draw_the_same_codes_without_exchanging_any(tmp_path):
    """Both ranks draw, seeded and unseeded; only then do they open a group and compare."""
    first, second = run(
        DRAW
        + """
import torch.distributed as dist
dist.init_process_group(
    "gloo",
    init_method="file://" + os.environ["MEETING"],
    rank=int(os.environ["RANK"]),
    world_size=int(os.environ["WORLD_SIZE"]),
)
mine = torch.tensor(codes)
everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
dist.all_gather(everyone, mine)
dist.destroy_process_group()
print(json.dumps({"codes": codes, "equal": [bool((mine == theirs).all()) for theirs in everyone]}))
""",
        processes=2,
        MEETING=tmp_path / "meeting",
    )
    assert first["equal"] == second["equal"] == [True, True]
    assert unseeded(first["codes"]) != [frame[0] for frame in first["codes"]]


@pytest.fixture(scope="module")
def replicas():
    """Codes of two data-parallel replicas, started with one model seed as vLLM starts them."""
    return [run(DRAW + "print(json.dumps(codes))", DATA_PARALLEL_RANK=rank)[0] for rank in range(2)]


def test_two_replicas_agree_on_seeded_requests(replicas):
    assert seeded(replicas[0]) == seeded(replicas[1])


def test_two_replicas_differ_on_unseeded_requests(replicas):
    """Every frame differs: 15 codes of 64 values do not meet by chance."""
    assert all(a != b for a, b in zip(unseeded(replicas[0]), unseeded(replicas[1]), strict=True))


def test_an_engine_started_again_with_the_same_seed_repeats_itself(replicas):
    (again,) = run(DRAW + "print(json.dumps(codes))", DATA_PARALLEL_RANK=1)
    assert again == replicas[1]
    (other,) = run(DRAW + "print(json.dumps(codes))", DATA_PARALLEL_RANK=1, MODEL_SEED=1)
    assert seeded(other) == seeded(replicas[1])
    assert unseeded(other) != unseeded(replicas[1])


def test_a_stream_exported_from_one_process_continues_in_another(replicas):
    """(seed, offset) of the seeded rows; global seed and offset of the unseeded one."""
    (exported,) = run("""
    streams = RowStreams(ROWS, "cpu")
    frames(streams, [7, None, 2**63], count=2)
    print(json.dumps({"offset": 2, "global": [streams.global_seed, streams.global_offset]}))
    """)
    (continued,) = run(
        """
    global_seed, global_offset = json.loads(os.environ["GLOBAL"])
    streams = RowStreams(8, "cpu", global_seed=global_seed, global_offset=global_offset)
    print(json.dumps(frames(streams, [7, None, 2**63], first=int(os.environ["OFFSET"]), count=2)))
    """,
        GLOBAL=json.dumps(exported["global"]),
        OFFSET=exported["offset"],
    )
    assert continued == replicas[0][2:]


FORKED = """
def in_a_child(work):
    \"\"\"What `work` returns in a forked child.\"\"\"
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, json.dumps(work()).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        value = json.load(pipe)
    os.waitpid(child, 0)
    return value

seeds = [7, None, 2**63]
streams = RowStreams(ROWS, "cpu", **json.loads(os.environ["STREAM"]))
before = frames(streams, seeds, count=1)

def draw():
    return frames(streams, seeds, first=1, count=2)

def with_a_child_of_its_own():
    return {"here": draw(), "grandchild": in_a_child(draw)}

children = [in_a_child(with_a_child_of_its_own) for _ in range(2)]
everyone = [draw(), *(codes for child in children for codes in child.values())]
print(json.dumps(everyone))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("stream", [{}, {"global_seed": 5}], ids=["derived", "given"])
def test_forked_processes_differ_on_unseeded_rows_alone(stream):
    """After an unseeded draw: the parent, two children and two grandchildren; and again in another run."""
    (everyone,) = run(FORKED, STREAM=json.dumps(stream))
    assert len({json.dumps(seeded(codes)) for codes in everyone}) == 1
    draws = [json.dumps(frame) for codes in everyone for frame in unseeded(codes)]
    assert len(set(draws)) == len(draws) == 10
    assert run(FORKED, STREAM=json.dumps(stream)) == [everyone], "a program started again repeats itself"
