"""Draws bench/results/<device>/*.csv, from the CSV alone: one SVG and one PNG a bench.

python bench/plot.py [FOLDER ...]        default: every folder in bench/results
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

sys.path.append(str(Path(__file__).parent))  # for `python bench/plot.py` and `-m bench.plot` alike

from flips import FLOOR
from records import CODE0_SEEDED, HOST_COLUMNS, RESULTS, Record, read_csv

STYLE = {
    "figure.dpi": 150,
    "figure.constrained_layout.use": True,
    "lines.linewidth": 1.4,
    "figure.facecolor": "white",
    "font.size": 9,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.hashsalt": "rowseed",  # the same CSV gives the same file
}
OURS = "#c1272d"
OTHERS = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#cc79a7", "#7f5f3f", "#555555", "#999933", "#332288")
MARKERS = "osD^vP*Xh"


def select(rows: Iterable[Record], **wanted) -> list[Record]:
    """Rows whose columns have the wanted values."""
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def distinct(rows: Iterable[Record], column: str) -> list:
    """Values of a column, in the order in which they come."""
    return list(dict.fromkeys(row[column] for row in rows))


OUR_LINES = (("-", "o"), ("--", "X"), (":", "P"))


class Looks:
    """A colour, marker and line for each name, the same in every panel; this project's are red, on top."""

    def __init__(self, names: Iterable[str]) -> None:
        others, ours = iter(zip(OTHERS, MARKERS, strict=True)), iter(OUR_LINES)
        self.of = {}
        for name in names:
            if name.startswith("rowseed"):
                line, marker = next(ours)
                look = {"color": OURS, "marker": marker, "linestyle": line, "zorder": 5}
            else:
                color, marker = next(others)
                look = {"color": color, "marker": marker, "zorder": 3}
            self.of[name] = {**look, "markersize": 4}


def ticks_at(axis, values: Iterable[float]) -> None:
    """Plain numbers at the values that were measured, nothing else."""
    axis.set_major_locator(FixedLocator(sorted(set(values))))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def line(axes: Axes, rows: list[Record], x: str, y: str, label: str, look: dict, band: tuple = ()) -> None:
    """y over x with the band between two more columns shaded."""
    rows = sorted(rows, key=lambda row: row[x])
    xs = [row[x] for row in rows]
    axes.plot(xs, [row[y] for row in rows], label=label, **look)
    if band:
        low, high = ([row[column] for row in rows] for column in band)
        axes.fill_between(xs, low, high, color=look["color"], alpha=0.15, linewidth=0)


def bars(axes: Axes, names: list[str], rows: list[Record], column: str, colors: list[str]) -> None:
    """Horizontal bars from below, each with its count; ≥ where a loop with unknown trips was counted once."""
    places = range(len(names))
    drawn = axes.barh(places, [row[column] for row in rows], color=colors, height=0.7)
    texts = [f"{'≥ ' if row.get('loops_once') else ''}{row[column]:,}" for row in rows]
    axes.bar_label(drawn, texts, padding=3, fontsize=7)
    axes.set_yticks(places, names)
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.15)


def titled(figure: Figure, title: str, rows: list[Record]) -> Figure:
    """Title and, below, where the figures come from."""
    first = rows[0]
    figure.suptitle(title, fontsize=10.5)
    source = f"{first['device']} | torch {first['torch']} | {first['commit']} | {first['time'][:10]}"
    figure.supxlabel(source, fontsize=6.5, color="#666666")
    return figure


def outside_legend(figure: Figure, axes: Axes) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center")


def sampler(rows: list[Record]) -> Figure:
    """Time of a draw over the batch, one panel a mode; band p20 to p80; the floor as a dashed line."""
    rows = select(rows, vocab=2048, dtype="bfloat16", top_p=1, seeded="all")
    modes = distinct(rows, "mode")
    modes = [mode for mode in modes if "cold" not in mode] or modes
    looks = Looks(impl for impl in distinct(rows, "impl") if impl != "floor")
    figure, panels = plt.subplots(
        1, len(modes), figsize=(4.6 * len(modes) + 2.4, 3.9), sharey=True, squeeze=False
    )
    for axes, mode in zip(panels[0], modes, strict=True):
        points = select(rows, mode=mode)
        for impl, look in looks.of.items():
            if drawn := select(points, impl=impl):
                line(axes, drawn, "batch", "p50_us", impl, look, ("p20_us", "p80_us"))
        if floor := sorted(select(points, impl="floor"), key=lambda row: row["batch"]):
            xs, ys = ([row[column] for row in floor] for column in ("batch", "p50_us"))
            axes.plot(xs, ys, "--", color="black", linewidth=1, label="floor: an empty call")
        axes.set(xscale="log", yscale="log", xlabel="batch (rows)", title=mode)
        ticks_at(axes.xaxis, distinct(points, "batch"))
    panels[0][0].set_ylabel("time of one draw (µs), median and p20 to p80")
    outside_legend(figure, panels[0][0])
    return titled(figure, "One draw for a whole batch: V = 2048, bfloat16, top-k 50, every row seeded", rows)


def flips(rows: list[Record]) -> Figure:
    """Share of codes that change over the size of the movement, one panel a dtype and spread."""
    panels_of = list(dict.fromkeys((row["dtype"], row["logit_sd"]) for row in rows))[:2]
    rules = distinct(rows, "rule")
    looks = Looks(sorted((rule for rule in rules if rule != FLOOR), key=lambda rule: rule != "rowseed"))
    figure, panels = plt.subplots(
        1,
        len(panels_of),
        figsize=(3.9 * len(panels_of) + 2, 3.7),
        sharey=True,
        squeeze=False,
    )
    for axes, (dtype, logit_sd) in zip(panels[0], panels_of, strict=True):
        points = select(rows, dtype=dtype, logit_sd=logit_sd)
        for rule, look in looks.of.items():
            line(axes, select(points, rule=rule), "noise_sd", "share", rule, look)
        floor = sorted(select(points, rule=FLOOR), key=lambda row: row["noise_sd"])
        xs, ys = ([row[column] for row in floor] for column in ("noise_sd", "share"))
        axes.plot(xs, ys, "--", color="black", linewidth=1, label="floor: total variation")
        axes.set(xscale="log", yscale="log", title=f"{dtype} logits of sd {logit_sd:g}")
        axes.set_xlabel("sd of the noise on the logits (nats)")
        ticks_at(axes.xaxis, xs)
    panels[0][0].set_ylabel("share of codes that change")
    outside_legend(figure, panels[0][0])
    return titled(figure, "Codes that change when logits move: same randomness on both sides", rows)


def static(rows: list[Record]) -> Figure:
    """What one row costs on sm_90, V = 2048: instructions issued and barriers."""
    rows = select(rows, target="sm_90", vocab=2048, top_p=1)
    chosen = [row for row in rows if row["dtype"] in ("bf16", "bfloat16") or row["kernel"].startswith("vLLM")]
    chosen = [row for row in chosen if row["issued"] != ""]  # none where the branch taken is not known
    names = [f"{row['kernel']}, {row['warps']} warp{'s' * (row['warps'] > 1)}" for row in chosen]
    colors = [OURS if row["kernel"].startswith("rowseed") else OTHERS[0] for row in chosen]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 0.42 * len(chosen) + 1.5), sharey=True)
    bars(left, names, chosen, "issued", colors)
    bars(right, names, chosen, "barriers", colors)
    left.invert_yaxis()  # the first on top; the right panel shares the axis
    left.set_xlabel("instructions issued a row (count)")
    right.set_xlabel("barriers on the path taken (count)")
    release = rows[0]["triton"]
    title = f"Static cost of one row's draw, Triton {release} for sm_90: V = 2048, top-k 50"
    return titled(figure, title, rows)


def frame(rows: list[Record]) -> Figure:
    """Milliseconds a frame over the batch, one panel a dtype."""
    dtypes = distinct(rows, "dtype")
    variants = [key for key in ("mode", "peer") if len({row.get(key) for row in rows}) > 1]
    figure, panels = plt.subplots(1, len(dtypes), figsize=(3.9 * len(dtypes) + 2, 3.7), squeeze=False)
    groups = list(dict.fromkeys(tuple(row[key] for key in variants) for row in rows))[:4]
    styles = ("-", "--", ":", "-.")
    for axes, dtype in zip(panels[0], dtypes, strict=True):
        for group, style in zip(groups, styles, strict=False):
            points = select(rows, dtype=dtype, **dict(zip(variants, group, strict=True)))
            points.sort(key=lambda row: row["batch"])
            what = f" ({', '.join(group)})" if group else ""
            for column, name, color in (("ours_ms", "rowseed", OURS), ("peer_ms", "vLLM-Omni", OTHERS[0])):
                shown = [row for row in points if isinstance(row[column], (int, float))]
                xs, ys = ([row[key] for row in shown] for key in ("batch", column))
                axes.plot(xs, ys, style, color=color, marker="o", markersize=3.5, label=name + what)
        axes.set(xscale="log", yscale="log", xlabel="batch (rows)", title=dtype)
        ticks_at(axes.xaxis, distinct(select(rows, dtype=dtype), "batch"))
    panels[0][0].set_ylabel("time of one frame of 15 codes (ms), median")
    outside_legend(figure, panels[0][0])
    return titled(figure, "One MTP frame at real sizes, random weights", rows)


def host(rows: list[Record]) -> Figure:
    """Host time of a step over its rows, every row seeded."""
    chosen = select(rows, seeded="all") or select(rows, seeded=rows[-1]["seeded"])
    looks = Looks(HOST_COLUMNS.values())
    figure, axes = plt.subplots(figsize=(6.6, 3.7))
    for column, label in HOST_COLUMNS.items():
        if points := [row for row in chosen if isinstance(row.get(column), (int, float))]:
            line(axes, points, "rows", column, label, looks.of[label])
    axes.set(xscale="log", yscale="log", xlabel="rows of the step", ylabel="host time of a step (µs), median")
    ticks_at(axes.xaxis, distinct(chosen, "rows"))
    outside_legend(figure, axes)
    return titled(figure, "What seeds cost the host at each step", rows)


def code0(rows: list[Record]) -> Figure:
    """Time of a step's code 0 over its rows: a panel for no, one and every row seeded."""
    looks = Looks(distinct(rows, "impl"))
    figure, panels = plt.subplots(1, len(CODE0_SEEDED), figsize=(11.5, 3.6), sharey=True)
    for axes, seeded in zip(panels, CODE0_SEEDED, strict=True):
        for impl, look in looks.of.items():
            line(axes, select(rows, impl=impl, seeded=seeded), "batch", "p50_us", impl, look)
        axes.set(xscale="log", yscale="log", xlabel="rows of the step", title=f"rows with a seed: {seeded}")
        ticks_at(axes.xaxis, distinct(rows, "batch"))
    panels[0].set_ylabel("time of code 0 (µs), median")
    outside_legend(figure, panels[0])
    return titled(figure, "Code 0: rowseed's draw and vLLM's, packing and generators included", rows)


SERVER_PANELS = (
    ("requests_per_s", "requests (1/s)"),
    ("audio_s_per_s", "audio made (s/s)"),
    ("first_audio_p50_ms", "time to first audio (ms), median"),
)


def server(rows: list[Record]) -> Figure:
    """Throughput and time to first audio over the concurrency."""
    looks = Looks(distinct(rows, "mode"))
    figure, panels = plt.subplots(1, len(SERVER_PANELS), figsize=(11.5, 3.6))
    for axes, (column, label) in zip(panels, SERVER_PANELS, strict=True):
        for mode, look in looks.of.items():
            line(axes, select(rows, mode=mode), "concurrency", column, mode, look)
        axes.set(xscale="log", xlabel="requests at once", ylabel=label)
        axes.set_ylim(bottom=0)
        ticks_at(axes.xaxis, distinct(rows, "concurrency"))
    outside_legend(figure, panels[0])
    return titled(figure, f"The real server over HTTP: {rows[0].get('model', '')}", rows)


PLOTS: dict[str, Callable[[list[Record]], Figure]] = {
    "sampler": sampler,
    "frame": frame,
    "host": host,
    "code0": code0,
    "server": server,
    "static": static,
    "flips": flips,
}


def draw(folder: Path) -> list[Path]:
    """Draw each CSV of a results folder beside it; returns the files written."""
    written = []
    with plt.rc_context(STYLE):
        for name, make in PLOTS.items():
            if not (source := folder / f"{name}.csv").exists() or not (rows := read_csv(source)):
                continue
            figure = make(rows)
            for kind in ("svg", "png"):
                # No date in the file, so that it changes only with the CSV.
                figure.savefig(folder / f"{name}.{kind}", metadata={"Date": None} if kind == "svg" else None)
                written.append(folder / f"{name}.{kind}")
            plt.close(figure)
    return written


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, help="default: every folder in bench/results")
    options = parser.parse_args(arguments)
    for folder in options.folders or sorted(path for path in RESULTS.glob("*") if path.is_dir()):
        if not folder.is_dir():
            parser.error(f"{folder} is not a folder")
        for path in draw(folder):
            print(path)


if __name__ == "__main__":
    main()
