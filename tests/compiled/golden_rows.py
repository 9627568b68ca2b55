"""The golden rows of `tests/data` through a backend of `sample`."""

import json
from collections import defaultdict
from pathlib import Path

import torch

from rowseed.kernels.sampling import sample
from rowseed.kernels.streams import RowStreams

FILES = ("golden_scheme1", "golden_min_p", "golden_logprob")


def read(name: str) -> list[dict]:
    return json.loads((Path(__file__).parents[1] / "data" / f"{name}.json").read_text())["cases"]


def logits_of(spec: dict | list) -> torch.Tensor:
    if isinstance(spec, list):
        return torch.tensor([float(x) for x in spec])
    i = torch.arange(spec["V"])
    grid = (i * spec["a"] + spec["b"]) % spec["m"] - spec["m"] // 2
    return (grid.double() / spec["d"] + spec.get("shift", 0)).float()


def wrong_rows(backend: str) -> tuple[int, list[str]]:
    """How many golden draws were made, and which differ from the files. Rows of one address space go
    together."""
    done, wrong = 0, []
    for file in FILES:
        for case in read(file):
            batches = defaultdict(list)
            for row in case["rows"]:
                seeded = "seed" in row
                stream = (0, 0) if seeded else (row.get("global_seed", 0), row.get("global_offset", 0))
                batches[row.get("codebook", 1), seeded, stream].append(row)
            logits = logits_of(case["logits"])
            for (codebook, seeded, stream), rows in batches.items():
                dtypes = [torch.float32, *(getattr(torch, name) for name in case.get("exact_in", []))]
                for dtype in dtypes:
                    done += len(rows)
                    found = _draw(backend, logits.to(dtype), codebook, seeded, stream, rows)
                    wrong += [f"{file}, {case['name']}, {dtype}: {what}" for what in found]
    return done, wrong


def _draw(backend, logits, codebook, seeded, stream, rows) -> list[str]:
    # An unseeded row is addressed by its place: idle rows fill the places between.
    places = list(range(len(rows))) if seeded else [row["row"] for row in rows]
    B = max(places) + 1
    seeds, offsets = [None] * B, [0] * B
    parameters = {
        "temperature": torch.zeros(B),
        "top_k": torch.full((B,), 50, dtype=torch.int32),
        "top_p": torch.ones(B),
        "min_p": torch.zeros(B),
    }
    defaults = {"temperature": 0.9, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
    for place, row in zip(places, rows, strict=True):
        seeds[place], offsets[place] = row.get("seed"), row.get("offset", 0)
        for name, default in defaults.items():
            parameters[name][place] = float(row.get(name, default))
    lines = RowStreams(max_rows=B, device="cpu", global_seed=stream[0], global_offset=stream[1])
    status, logprob = torch.zeros(B, dtype=torch.int32), torch.zeros(B)
    codes = sample(
        logits.expand(B, -1).contiguous(), lines.pack(seeds=seeds, offsets=offsets), codebook=codebook,
        status=status, logprob=logprob, backend=backend, **parameters,
    )  # fmt: skip
    words = [f"{word & 0xFFFFFFFF:08x}" for word in logprob.view(torch.int32).tolist()]
    wrong = []
    for place, row in zip(places, rows, strict=True):
        got = {"code": int(codes[place]), "status": int(status[place]), "logprob": words[place]}
        if any(row[name] != got[name] for name in got if name in row):
            wrong.append(f"{row} gave {got}")
    return wrong
