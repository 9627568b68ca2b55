"""Writes README's tables from bench/results, between its markers.

python bench/tables.py [--check]
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # for `python bench/tables.py` and `-m bench.tables` alike

from records import CODE0_SEEDED, HOST_COLUMNS, RESULTS, ROOT, SCHEMA, Record, read_csv

START, END = "<!-- bench:start -->", "<!-- bench:end -->"

WHAT = {
    "sampler": "the sampler beside its peers",
    "frame": "a frame beside vLLM-Omni's predictor",
    "host": "packing and dispatch on the host",
    "code0": "code 0 beside vLLM's own draw",
    "server": "a real server over HTTP",
    "static": "the kernel's static cost",
    "flips": "codes that change when logits move",
}
ON_GPU = "sampler", "frame", "host", "code0", "server"
"""Benches whose figures on a CPU say nothing of a GPU."""


def number(value: object) -> str:
    """Three significant digits, thousands with commas; text as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def markdown(header: list[str], rows: Iterable[list[object]]) -> str:
    """A table: text on the left, numbers on the right."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1)]
    lines += [[number(cell) for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def sampler(rows: list[Record]) -> str:
    """Median time of a draw by implementation and batch, in the fastest mode that was run."""
    plain = [r for r in rows if r["vocab"] == 2048 and r["dtype"] == "bfloat16" and r["top_p"] == 1]
    mode = plain[-1]["mode"] if "graph warm" not in {r["mode"] for r in plain} else "graph warm"
    at = {(r["impl"], r["batch"], r["seeded"]): r["p50_us"] for r in plain if r["mode"] == mode}
    batches = sorted({batch for _, batch, _ in at})
    impls = [i for i in dict.fromkeys(i for i, _, _ in at) if any((i, b, "all") in at for b in batches)]
    middle = 64 if 64 in batches else batches[-1]
    table = []
    for impl in impls:
        seeded, none = at.get((impl, middle, "all")), at.get((impl, middle, "none"))
        extra = f"{number(seeded)} / {number(none)}" if seeded and none else ""
        table.append([impl, *(at.get((impl, batch, "all"), "") for batch in batches), extra])
    head = ["one draw, median µs", *(f"B = {batch}" for batch in batches), f"seeds / none, B = {middle}"]
    note = f"V = 2048, bfloat16, top-k 50, every row seeded, {mode}."
    if rows[0]["driver"] == "none":
        note += " On a CPU numba's code draws for rowseed; its Triton kernel needs a GPU."
    return f"{note}\n\n{markdown(head, table)}"


def frame(rows: list[Record]) -> str:
    extra = [key for key in ("mode", "peer") if rows[0].get(key)]
    columns = ["dtype", *extra, "batch", "ours_ms", "peer_ms", "ratio", "sampler_launches"]
    names = {"ours_ms": "rowseed, ms", "peer_ms": "vLLM-Omni, ms", "sampler_launches": "sampler launches"}
    return markdown([names.get(c, c) for c in columns], ([row[c] for c in columns] for row in rows))


def host(rows: list[Record]) -> str:
    columns = [column for column in HOST_COLUMNS if column in rows[0]]
    head = ["rows of a step", "seeded", *(HOST_COLUMNS[column] for column in columns)]
    body = ([row["rows"], row["seeded"], *(row[column] for column in columns)] for row in rows)
    return "Host time of a step, median µs:\n\n" + markdown(head, body)


def code0(rows: list[Record]) -> str:
    at = {(row["batch"], row["impl"], row["seeded"]): row["p50_us"] for row in rows}
    head = ["rows of a step", "draw", *(f"seeded: {seeded}" for seeded in CODE0_SEEDED)]
    body = [
        [f"{batch}", impl, *(at.get((batch, impl, seeded), "") for seeded in CODE0_SEEDED)]
        for batch, impl in dict.fromkeys((row["batch"], row["impl"]) for row in rows)
    ]
    note = (
        f"V = {rows[0]['vocab']}, {rows[0]['dtype']}, top-k {rows[0]['top_k']}; rowseed's with its packing."
    )
    return f"{note} Median µs of a step:\n\n" + markdown(head, body)


def server(rows: list[Record]) -> str:
    columns = {
        "mode": "",
        "concurrency": "at once",
        "requests": "requests",
        "requests_per_s": "requests/s",
        "audio_s_per_s": "audio s/s",
        "first_audio_p50_ms": "first audio p50, ms",
        "first_audio_p95_ms": "p95, ms",
        "same_as_solo": "same bytes as alone",
    }
    return markdown(list(columns.values()), ([row[c] for c in columns] for row in rows))


STATIC_PATH = "instructions", "issued", "barriers", "fp64"
"""Columns of the static bench that count along the path taken."""


def at_least(row: Record, column: str) -> str:
    """The figure, marked where a loop with unknown trips was counted once; "?" where there is none."""
    if row[column] == "":
        return "?"
    return ("≥ " if row.get("loops_once") else "") + number(row[column])


def static(rows: list[Record]) -> str:
    chosen = [row for row in rows if row["target"] == "sm_90" and row["vocab"] == 2048 and row["top_p"] == 1]
    columns = [
        "kernel",
        "dtype",
        "warps",
        "instructions",
        "issued",
        "barriers",
        "fp64",
        "registers",
        "spills",
    ]
    text = f"Compiled by Triton {rows[0]['triton']} for sm_90, V = 2048, top-k 50; counts, not times; a loop"
    text += " whose trips depend on the logits is counted once (≥); ?: the walk cannot tell the branch taken"
    return f"{text}:\n\n" + markdown(
        columns, ([at_least(row, c) if c in STATIC_PATH else row[c] for c in columns] for row in chosen)
    )


def flips(rows: list[Record]) -> str:
    chosen = [row for row in rows if row["dtype"] == "bfloat16" and row["logit_sd"] == 2]
    noises = list(dict.fromkeys(row["noise_sd"] for row in chosen))
    share = {(row["rule"], row["noise_sd"]): f"{row['share']:.4f}" for row in chosen}
    rules = sorted(dict.fromkeys(row["rule"] for row in chosen), key=lambda rule: rule != "rowseed")
    head = ["share of codes that change", *(f"noise sd {noise}" for noise in noises)]
    return f"bfloat16 logits of sd 2, V = 2048, top-k 50, {chosen[0]['rows']} rows:\n\n" + markdown(
        head, ([rule, *(share[rule, noise] for noise in noises)] for rule in rules)
    )


TABLES = {
    "sampler": sampler,
    "frame": frame,
    "host": host,
    "code0": code0,
    "server": server,
    "static": static,
    "flips": flips,
}


def in_short(name: str, folder: Path) -> str:
    """One line of the bench's result in this folder; empty if there is none."""
    if not (source := folder / f"{name}.csv").exists() or not (rows := read_csv(source)):
        return ""
    if name == "sampler":
        plain = [r for r in rows if r["vocab"] == 2048 and r["dtype"] == "bfloat16" and r["seeded"] == "all"]
        plain = [r for r in plain if r["batch"] == 64 and r["top_p"] == 1]
        mode = "graph warm" if any(r["mode"] == "graph warm" for r in plain) else plain[0]["mode"]
        return "B = 64: " + ", ".join(
            f"{r['impl']} {number(r['p50_us'])} µs" for r in plain if r["mode"] == mode
        )
    if name == "code0":
        most = max(r["batch"] for r in rows)
        return f"B = {most}, all seeded: " + ", ".join(
            f"{r['impl']} {number(r['p50_us'])} µs"
            for r in rows
            if r["batch"] == most and r["seeded"] == "all"
        )
    if name == "static":
        plain = [r for r in rows if r["target"] == "sm_90" and r["vocab"] == 2048 and r["dtype"] == "bf16"]
        plain = [r for r in plain if r["top_p"] == 1 and r["top_k"] == 50]
        figures = "; ".join(
            f"{r['kernel']}: {at_least(r, 'issued')} issued, {at_least(r, 'barriers')} barriers"
            for r in plain[:2]
        )
        return f"Triton {rows[0]['triton']}: {figures}"
    if name == "flips":
        plain = [r for r in rows if r["noise_sd"] == 0.01 and r["dtype"] == "bfloat16" and r["logit_sd"] == 2]
        return "noise .01: " + ", ".join(f"{r['rule']} {r['share']:.3f}" for r in plain)
    row = ([r for r in rows if r.get("seeded") == "all"] or rows)[-1]
    if name == "host":
        return "{} rows: {} µs, vLLM-Omni V1 {}, V2 {}".format(
            row["rows"], *(number(row[key]) for key in ("ours_us", "peer_v1_us", "peer_v2_us"))
        )
    if name == "frame":
        return "{}, batch {}: {} ms, vLLM-Omni {} ms".format(
            row["dtype"], row["batch"], number(row["ours_ms"]), number(row["peer_ms"])
        )
    most = max(r["concurrency"] for r in rows)
    return f"{most} at once: " + ", ".join(
        f"{r['mode']} {number(r['requests_per_s'])}/s" for r in rows if r["concurrency"] == most
    )


def device_section(folder: Path, root: Path) -> str:
    """Everything measured on one device."""
    parts = []
    for name, table in TABLES.items():
        if not (source := folder / f"{name}.csv").exists() or not (rows := read_csv(source)):
            continue
        where = rows[0]
        parts.append(
            f"**{WHAT[name][0].upper()}{WHAT[name][1:]}** (commit {where['commit']}, {where['time'][:10]})"
        )
        parts.append(table(rows))
        if (image := folder / f"{name}.png").exists():
            parts.append(f"![{WHAT[name]}]({image.relative_to(root).as_posix()})")
    return "\n\n".join(parts)


def measured(results: Path) -> dict[str, tuple[Path, set[str]]]:
    """Device name -> its folder and the benches that it has."""
    found = {}
    for folder in sorted(path for path in results.glob("*") if path.is_dir()):
        names = {name for name in SCHEMA if (folder / f"{name}.csv").exists()}
        if names:
            found[read_csv(folder / f"{sorted(names)[0]}.csv")[0]["device"]] = (folder, names)
    return found


def missing(found: dict[str, tuple[Path, set[str]]]) -> list[str]:
    """Sentences on what has not been measured."""
    gpus = {device: names for device, (folder, names) in found.items() if has_gpu(folder)}
    lines = []
    absent = [name for name in ON_GPU if not any(name in names for names in gpus.values())]
    if absent:
        what = "; ".join(WHAT[name] for name in absent)
        lines.append(f"Not measured yet on any GPU: {what}. `make bench` on one measures them.")
    for device, (_, names) in found.items():
        if lacking := [WHAT[name] for name in SCHEMA if name not in names]:
            lines.append(f"Not measured on {device}: {'; '.join(lacking)}.")
    return lines


def has_gpu(folder: Path) -> bool:
    """Whether the folder's device is an accelerator: its rows name a driver."""
    return any(row["driver"] != "none" for path in folder.glob("*.csv") for row in read_csv(path)[:1])


def text(results: Path = RESULTS, root: Path = ROOT) -> str:
    """What goes between the markers."""
    found = measured(results)
    parts = [
        f"_Written by `bench/tables.py` from `{results.relative_to(root).as_posix()}`._",
        *missing(found),
    ]
    for device, (folder, _) in found.items():
        parts += [f"### Measured on {device}", device_section(folder, root)]
    return "\n\n".join(parts)


def update(readme: Path, body: str) -> bool:
    """Put `body` between the markers of the file; True if it changed. ValueError without markers."""
    before = readme.read_text()
    if before.count(START) != 1 or before.count(END) != 1 or before.index(START) > before.index(END):
        raise ValueError(f"{readme} must have one line {START} and, below it, one line {END}")
    head, rest = before.split(START)
    after = f"{head}{START}\n{body}\n{END}{rest.split(END)[1]}"
    readme.write_text(after)
    return after != before


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; status 1 if README is not up to date"
    )
    options = parser.parse_args(arguments)
    readme, body = ROOT / "README.md", text()
    if options.check:
        return 0 if body in readme.read_text() else 1
    print("README.md changed" if update(readme, body) else "README.md is up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
