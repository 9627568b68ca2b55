"""Flat records with the promised keys, and a CSV that says where each row comes from."""

import pytest
import records
from timing import Timing

KEYS = {
    "static": "kernel target vocab dtype top_k top_p warps "
    "instructions issued barriers fp64 registers spills shared",
    "frame": "device dtype batch ours_ms peer_ms ratio sampler_launches",
    "host": "rows seeded ours_us peer_v1_us peer_v2_us",
    "sampler": "impl batch vocab dtype top_k top_p seeded mode p20_us p50_us p80_us",
}


@pytest.mark.parametrize("bench", KEYS)
def test_promised_keys_are_required(bench):
    keys = KEYS[bench].split()
    record = dict.fromkeys(keys, 1)
    records.check(bench, [record])
    for key in keys:
        with pytest.raises(ValueError, match=f"lacks {key}"):
            records.check(bench, [{k: v for k, v in record.items() if k != key}])


def test_nested_records_are_refused():
    record = dict.fromkeys(records.SCHEMA["host"], 1)
    with pytest.raises(ValueError, match="must be flat, but extra"):
        records.check("host", [{**record, "extra": [1, 2]}])


def test_csv_returns_the_records_with_the_environment(tmp_path):
    first = {**dict.fromkeys(records.SCHEMA["host"], 2.5), "seeded": "all", "rows": 64}
    second = {**first, "rows": 1, "note": "with a comma, and a column of its own"}
    where = records.environment()
    assert set(where) == set(records.ENVIRONMENT)
    assert where["device"] and where["torch"] and where["time"].endswith("+00:00")
    records.write_csv(tmp_path / "host.csv", "host", [first, second], where)
    rows = records.read_csv(tmp_path / "host.csv")
    assert [row["rows"] for row in rows] == [64, 1]
    assert rows[0]["ours_us"] == 2.5 and rows[0]["note"] == "" and rows[1]["note"] == second["note"]
    assert all(row["commit"] == where["commit"] and row["torch"] == where["torch"] for row in rows)


def test_percentiles():
    assert Timing.of(range(1, 102)) == (21, 51, 81)
    assert Timing.of([7.0]) == (7, 7, 7)
    with pytest.raises(ValueError, match="at least one sample"):
        Timing.of([])
