"""Seeds and extra_params of a speech batch, of the whole and of an item, over HTTP."""

import base64

import httpx
import numpy as np
import pytest
from speech_app import noise, serve
from vllm_omni.errors import OmniClientError

from rowseed.kernels.philox import TAG_GLOBAL_SEED
from rowseed.kernels.streams import _two_words, item_seed
from rowseed.vllm_omni.speech_batch import ItemFields, _warn_of_dropped_fields, read_items

GOLD = [8607521857261498310, 7754979415227611188, 3034164446532601123]  # of seed 11; scheme 1


@pytest.fixture(scope="module")
def server():
    with serve() as running:
        yield running


def post(server, *items, **whole):
    items = [{"input": "hello", **item} for item in items]
    return httpx.post(
        f"{server.url}/v1/audio/speech/batch", json={"items": items, "response_format": "pcm", **whole}
    )


def seeds(response):
    return [result.get("rowseed", {}).get("seed") for result in response.json()["results"]]


def test_each_item_is_spoken_with_the_seed_that_its_result_names(server):
    response = post(server, {}, {"seed": 7}, {"extra_params": {"tts_local_seed": -3}}, {}, seed=11)
    assert seeds(response) == [str(seed) for seed in (item_seed(11, 0), 7, -3, item_seed(11, 3))]
    for result, seed in zip(response.json()["results"], seeds(response), strict=True):
        assert result["rowseed"]["scheme"] == 1 and "error" not in result
        audio = np.frombuffer(base64.b64decode(result["audio_data"]), "<i2")
        assert abs(audio - noise(int(seed)).numpy() * 32767).max() <= 2
    talkers = [stages[0] for stages in server.engine.stages[-4:]]
    assert {talker.seed for talker in talkers} == {int(seed) for seed in seeds(response)}


def test_a_batch_without_a_seed_says_none(server):
    assert seeds(post(server, {}, {"seed": 0}, {"Seed": 5}, Seed=5)) == ["none", "0", "none"]


def test_an_items_extra_params_win_over_the_batchs_key_by_key(server):
    whole = {"subtalker_top_k": 3, "subtalker_top_p": 0.5, "tts_local_seed": 9}
    response = post(server, {"extra_params": {"subtalker_top_k": 4}}, extra_params=whole)
    assert seeds(response) == [str(item_seed(9, 0))]
    extra = server.engine.stages[-1][0].extra_args
    assert (extra["subtalker_top_k"], extra["subtalker_top_p"]) == (4, 0.5)


@pytest.mark.parametrize(
    "bad, name",
    [
        ({"seed": "42"}, "seed"),
        ({"seed": True}, "seed"),
        ({"seed": 7.0}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"extra_params": {"tts_local_seed": "abc"}}, "tts_local_seed"),
        ({"extra_params": {"subtalker_top_p": 2}}, "subtalker_top_p"),
        ({"extra_params": [1]}, "extra_params"),
    ],
    ids=str,
)
def test_a_bad_item_fails_alone_and_a_bad_batch_as_a_whole(server, bad, name):
    response = post(server, {"seed": 1}, bad, {"seed": 2})
    first, second, third = response.json()["results"]
    assert [first["status"], second["status"], third["status"]] == ["success", "error", "success"]
    assert second["error"].startswith(f"{name} must be ")
    assert seeds(response) == ["1", None, "2"] and response.json()["failed"] == 1
    asked = len(server.engine.stages)
    response = post(server, {"seed": 1}, **bad)
    assert response.status_code == 400 and f"{name} must be " in response.text
    assert len(server.engine.stages) == asked


def test_vllm_omnis_own_checks_of_items_stay(server):
    (result,) = post(server, {"input": " ", "seed": 1}).json()["results"]
    assert result["error"] == "Input text cannot be empty"


def test_other_models_batches_are_left_alone():
    with serve("fish_speech") as other:
        assert seeds(post(other, {"seed": 7})) == [None]
        assert other.engine.stages[-1][0].seed is None


def test_an_items_seed_is_philox_of_the_batchs_and_the_index():
    assert [item_seed(11, index) for index in (0, 1, 2**32)] == GOLD
    assert item_seed(-1, 5) == item_seed(2**64 - 1, 5)
    found = {item_seed(seed, index) for seed in (0, 1, -1, 2**32, 2**63 - 1) for index in range(200)}
    assert len(found) == 1000 and all(0 <= seed < 2**63 for seed in found)
    assert item_seed(11, 2) != _two_words(11, (2, 0, 0), TAG_GLOBAL_SEED) & (2**63 - 1)
    with pytest.raises(TypeError, match="seed must be an int"):
        item_seed("11", 0)


def test_items_of_a_body_that_nobody_saw_have_no_fields():
    assert read_items({}, 2) == [ItemFields(), ItemFields()]
    with pytest.raises(OmniClientError, match="seed"):
        read_items({"seed": "1"}, 1)


def test_a_lost_body_is_said_once(log):
    _warn_of_dropped_fields.cache_clear()
    _warn_of_dropped_fields()
    _warn_of_dropped_fields()
    (record,) = log
    assert "seeds and extra_params are dropped" in record.getMessage()
