"""Plots and README's tables come from the CSV alone."""

import matplotlib.image
import plot
import pytest
import records
import tables

WHERE = {
    **dict.fromkeys(records.ENVIRONMENT, ""),
    **{"device": "Test CPU", "driver": "none", "triton": "3.99.0"},
    **{"commit": "abc123", "time": "2026-01-02T03:04:05+00:00"},
}


def sample(bench):
    """A few records of a bench, with figures that can be found again."""
    if bench == "sampler":
        base = {
            "vocab": 2048,
            "dtype": "bfloat16",
            "top_k": 50,
            "top_p": 1.0,
            "seeded": "all",
            "mode": "eager",
        }
        points = [(impl, batch) for impl in ("rowseed", "peer", "floor") for batch in (1, 64)]
        return [
            {"impl": i, "batch": b, **base, "p20_us": 9.0, "p50_us": 10.5 + b, "p80_us": 90.0}
            for i, b in points
        ]
    if bench == "flips":
        base = {
            "logit_sd": 2.0,
            "vocab": 2048,
            "dtype": "bfloat16",
            "top_k": 50,
            "temperature": 0.9,
            "rows": 9,
        }
        rules = {"rowseed": 0.01, "inverse cdf by id": 0.09, "total variation": 0.008}
        return [
            {"rule": rule, "noise_sd": sd, **base, "share": share * sd, "share_se": 0.0}
            for rule, share in rules.items()
            for sd in (0.5, 1.0)
        ]
    if bench == "static":
        base = {"target": "sm_90", "vocab": 2048, "dtype": "bf16", "top_k": 50, "top_p": 1.0, "warps": 4}
        counts = {"instructions": 1111, "issued": 4444, "barriers": 22, "fp64": 0, "registers": 88}
        unknown = dict.fromkeys(("instructions", "issued", "barriers", "fp64"))
        figures = {"rowseed": counts, "peer": counts, "riddle": counts | unknown}
        return [{"kernel": k, **base, **f, "spills": 0, "shared": 16} for k, f in figures.items()]
    if bench == "host":
        return [
            {"rows": rows, "seeded": "all", "ours_us": 20.5, "peer_v1_us": 300.0, "peer_v2_us": 4000.0}
            for rows in (1, 64)
        ]
    if bench == "code0":
        base = {"vocab": 3072, "dtype": "float32", "top_k": 50, "p20_us": 9.0, "p80_us": 90.0}
        points = [
            (impl, batch, seeded)
            for impl in ("rowseed, V1", "vLLM, V1")
            for batch in (1, 64)
            for seeded in records.CODE0_SEEDED
        ]
        return [{"impl": i, "batch": b, "seeded": s, **base, "p50_us": 10.5 + b} for i, b, s in points]
    if bench == "frame":
        times = {"ours_ms": 123.0, "peer_ms": 246.0, "ratio": 2.0, "sampler_launches": 15}
        return [{"device": "cpu", "dtype": "bfloat16", "batch": b, **times} for b in (1, 8)]
    keys = records.SCHEMA["server"][3:]
    modes = ("seeded", "unseeded", "seeded without rowseed")
    return [
        {"mode": mode, "concurrency": c, "requests": 8, **dict.fromkeys(keys, 3.25 * c)}
        for mode in modes
        for c in (1, 4)
    ]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    for bench in records.SCHEMA:
        records.write_csv(root / f"results/test-cpu/{bench}.csv", bench, sample(bench), WHERE)
    return root / "results"


@pytest.fixture(scope="module")
def drawn(results):
    return plot.draw(results / "test-cpu")


def test_each_bench_gets_an_svg_and_a_png(drawn):
    assert sorted(path.name for path in drawn) == sorted(
        f"{bench}.{kind}" for bench in records.SCHEMA for kind in ("svg", "png")
    )


def test_pngs_show_something(drawn):
    for path in (path for path in drawn if path.suffix == ".png"):
        pixels = matplotlib.image.imread(path)[..., :3]
        assert min(pixels.shape[:2]) > 300, path.name
        colours = pixels.reshape(-1, 3)
        coloured = (colours.max(1) - colours.min(1) > 0.3).mean()
        assert 0.0005 < coloured < 0.5, f"{path.name}: {coloured:.2%} coloured pixels"


def test_svgs_hold_axes_labels_with_units(drawn):
    # Glyphs are drawn as paths, but matplotlib notes each text as a comment.
    text = {path.stem: path.read_text() for path in drawn if path.suffix == ".svg"}
    assert "time of one draw (µs)" in text["sampler"] and "floor" in text["sampler"]
    assert "(ms)" in text["frame"] and "(µs)" in text["host"] and "(1/s)" in text["server"]
    assert "Triton 3.99.0" in text["static"] and "peer" in text["static"] and "riddle" not in text["static"]
    assert all("2026-01-02" in svg and "Test CPU" in svg for svg in text.values())


def test_equal_csv_gives_equal_files(results, drawn, tmp_path):
    (tmp_path / "flips.csv").write_bytes((results / "test-cpu/flips.csv").read_bytes())
    for path in plot.draw(tmp_path):
        assert path.read_bytes() == (results / "test-cpu" / path.name).read_bytes()


def test_tables_hold_the_figures_and_say_what_is_missing(results, drawn):
    text = tables.text(results, results.parent)
    assert "### Measured on Test CPU" in text and "commit abc123" in text
    assert "| rowseed | 11.5 | 74.5 |" in text
    assert "| rowseed | 0.0050 | 0.0100 |" in text
    assert "| 64 | rowseed, V1 | 74.5 | 74.5 | 74.5 |" in text
    assert "| rowseed | bf16 | 4 | 1,111 | 4,444 | 22 |" in text
    assert "| riddle | bf16 | 4 | ? | ? | ? | ? | 88 | 0 |" in text
    assert "Compiled by Triton 3.99.0 for sm_90" in text
    assert "![the sampler beside its peers](results/test-cpu/sampler.png)" in text
    assert "Not measured yet on any GPU: the sampler beside its peers; a frame" in text


def test_a_gpu_folder_ends_the_warning(results, tmp_path):
    gpu = {**WHERE, "device": "Test GPU", "driver": "999.1"}
    for bench in tables.ON_GPU:
        records.write_csv(tmp_path / f"results/test-gpu/{bench}.csv", bench, sample(bench), gpu)
    text = tables.text(tmp_path / "results", tmp_path)
    assert "Not measured yet on any GPU" not in text
    assert "Not measured on Test GPU: the kernel's static cost; codes that change" in text


def test_readme_keeps_all_but_what_is_between_the_markers(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{tables.START}\nold\n{tables.END}\nafter\n")
    assert tables.update(readme, "new")
    assert readme.read_text() == f"before\n{tables.START}\nnew\n{tables.END}\nafter\n"
    assert not tables.update(readme, "new")
    readme.write_text("no markers")
    with pytest.raises(ValueError, match="bench:start"):
        tables.update(readme, "new")
    assert readme.read_text() == "no markers"
