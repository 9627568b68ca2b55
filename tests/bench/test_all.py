"""The runner of all benches, with small scripts in place of the benches."""

import importlib

import pytest
import records

runner = importlib.import_module("all")

GOOD = """
import argparse, json
parser = argparse.ArgumentParser()
parser.add_argument("--json")
parser.add_argument("--quick", action="store_true")
row = {"rows": 1, "seeded": "all", "ours_us": 1.5, "peer_v1_us": 30, "peer_v2_us": 45}
rows = [row, row | {"rows": 64}]
json.dump(rows, open(parser.parse_args().json, "w"))
"""


@pytest.fixture
def benches(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "HERE", tmp_path)
    parts = (
        runner.Part("flips", 20, 20, 20, timed=False),
        runner.Part("host", 20, 20, 20),
        runner.Part("server", 20, 20, 0, reserve_s=5),
    )
    monkeypatch.setattr(runner, "PARTS", parts)
    for part in parts:
        (tmp_path / f"{part.name}.py").write_text("raise SystemExit(3)" if part.name != "host" else GOOD)
    return tmp_path


def test_results_of_one_bench_survive_the_failure_of_another(benches, capsys):
    out = benches / "out"
    assert runner.main(["--out", str(out)]) == 1
    rows = records.read_csv(out / "host.csv")
    assert [row["rows"] for row in rows] == [1, 64] and rows[0]["commit"] == records.commit()
    assert sorted(path.name for path in out.iterdir()) == ["host.csv", "host.png", "host.svg"]
    assert "exit status 3" in " ".join(capsys.readouterr().out.split())


def test_a_quick_run_leaves_the_server_out_and_succeeds(benches):
    assert runner.main(["--quick", "--out", str(benches / "out"), "--only", "host", "server"]) == 0


def test_a_bench_that_takes_too_long_is_ended(benches):
    (benches / "host.py").write_text("import time; time.sleep(60)")
    assert runner.run_part(runner.PARTS[1], [], 0.5) == "not done within 0 s"
