"""`make run`: its checks can fail, and the whole of it runs."""

import hashlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    """Import a module of examples/ by name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@pytest.fixture
def speech(example):
    """Speech-loud noise with random codes; `changes` replaces fields."""
    generator = np.random.default_rng(0)
    noise = generator.normal(0, 0.15, 4 * 1920).clip(-0.9, 0.9).astype(np.float32)
    codes = generator.integers(0, 2048, (4, 16))
    return lambda **changes: example("speech").Speech(codes, noise, 24000, 0.1)._replace(**changes)


def test_loud_speech_passes_and_silence_and_clipping_fail(example, speech) -> None:
    loud = example("checks").loud
    noise = speech().waveform
    assert loud([speech(), speech()]).passed
    assert not loud([speech(), speech(waveform=np.zeros_like(noise))]).passed
    assert not loud([speech(), speech(waveform=noise * 0.01)]).passed
    assert not loud([speech(waveform=np.sign(noise))]).passed
    assert not loud([speech(waveform=noise[:0])]).passed
    assert not loud([]).passed


def test_same_speech_passes_and_each_kind_of_difference_fails(example, speech) -> None:
    same = example("checks").same
    original = speech()
    codes, waveform = original.codes.copy(), original.waveform.copy()
    codes[3, 15] ^= 1
    waveform[-1] = 0.5
    assert same("", [original, speech(), speech()]).passed
    assert not same("", [original, speech(), speech(codes=codes)]).passed
    assert not same("", [original, speech(waveform=waveform), speech()]).passed
    assert not same("", [original, speech(codes=original.codes[:-1])]).passed
    assert not same("", [original]).passed
    nothing = speech(codes=original.codes[:0], waveform=waveform[:0])
    assert not same("", [nothing, nothing]).passed


def test_different_speech_must_differ_in_residual_codes(example, speech) -> None:
    different = example("checks").different
    other, first_only = speech().codes.copy(), speech().codes.copy()
    other[:, 1:] ^= 1
    first_only[:, 0] ^= 1
    waveform = -speech().waveform
    assert different("", speech(), speech(codes=other, waveform=waveform)).passed
    assert not different("", speech(), speech()).passed
    assert not different("", speech(), speech(codes=first_only, waveform=waveform)).passed
    assert not different("", speech(), speech(codes=other)).passed


@pytest.mark.parametrize(
    "rows, passed",
    [
        ({"1": {"seeded": 0, "unseeded": 0}, "2": {"seeded": 20, "unseeded": 30}}, True),
        ({"1": {"seeded": 15, "unseeded": 10}, "2": {"seeded": 5, "unseeded": 20}}, True),
        ({"2": {"seeded": 19, "unseeded": 30}}, False),
        ({"2": {"seeded": 20, "unseeded": 0}}, False),
        ({}, False),
    ],
)
def test_all_frames_must_have_come_through_rowseed(example, rows, passed: bool) -> None:
    assert example("checks").through_rowseed(rows, seeded_frames=20, unseeded_frames=30).passed is passed


@pytest.mark.parametrize("passed, code", [(True, 0), (False, 1)])
def test_a_failed_check_is_the_exit_code(example, monkeypatch, tmp_path, passed: bool, code: int) -> None:
    serve = example("serve")
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(sys, "argv", ["serve.py", "--out", str(tmp_path / "out")])
    monkeypatch.setattr(serve, "serve", lambda *_: {"checks": [{"passed": True}, {"passed": passed}]})
    assert serve.main() == code


def test_requests_are_in_two_languages_with_and_without_seeds_and_one_seed_twice(example) -> None:
    lines = (EXAMPLES / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    requests = [example("speech").Request(**json.loads(line)) for line in lines]
    seeds = [request.seed for request in requests if request.seed is not None]
    assert len({request.language for request in requests}) == 2
    assert any(seeds.count(seed) == 2 for seed in seeds)
    assert sum(request.seed is None for request in requests) >= 2


@pytest.mark.engine
def test_make_run_through_the_real_engine(tmp_path: Path) -> None:
    requests = [
        {"text": "Is anybody there?", "language": "English", "seed": 7},
        {"text": "Wer ist da?", "language": "German"},
    ]
    lines = tmp_path / "requests.jsonl"
    lines.write_text("".join(json.dumps(request) + "\n" for request in requests))
    out = tmp_path / "out"
    command = [sys.executable, EXAMPLES / "serve.py", "--requests", lines, "--out", out]
    result = subprocess.run(command, capture_output=True, text=True, timeout=420, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]

    report = json.loads((out / "run.json").read_text())
    assert [check["passed"] for check in report["checks"]] == [True] * 5
    assert [request["text"] for request in report["requests"]] == [request["text"] for request in requests]
    for request in report["requests"]:
        wav = (out / request["wav"]).read_bytes()
        assert hashlib.sha256(wav).hexdigest() == request["wav_sha256"]
        assert wav[:4] == b"RIFF" and request["frames"] > 0
    assert (out / "codes.png").read_bytes().startswith(b"\x89PNG")
