"""What the log says of a request's seed, and the seed that an unseeded request may be given."""

import logging
import re
from types import SimpleNamespace

import pytest
from vllm.sampling_params import SamplingParams
from vllm_omni.entrypoints.async_omni import AsyncOmni

from rowseed.vllm_omni import fresh_seeds
from rowseed.vllm_omni.fresh_seeds import gives_fresh_seeds, join_generate


class Client:
    """What ``generate`` needs of AsyncOmni."""

    defaults = (SamplingParams(), SamplingParams())

    def resolve_sampling_params_list(self, given, allow_delta_coercion):
        assert given is None and allow_delta_coercion
        return list(self.defaults)

    @join_generate
    def generate(self, prompt, sampling_params=None, request_id="", *, sampling_params_list=None, **kwargs):
        return SimpleNamespace(
            params=sampling_params, id=request_id, stages=sampling_params_list, others=kwargs
        )


@pytest.fixture(params=["global", "fresh", None])
def choice(request, monkeypatch):
    monkeypatch.delenv("ROWSEED_UNSEEDED", raising=False)
    if request.param:
        monkeypatch.setenv("ROWSEED_UNSEEDED", request.param)
    gives_fresh_seeds.cache_clear()
    yield request.param
    gives_fresh_seeds.cache_clear()


def seeded(seed, **params):
    return SamplingParams(extra_args={"tts_local_seed": seed, "other": 1}, **params)


def test_an_unseeded_request_gets_a_seed_only_where_it_is_asked_for(choice, log):
    given = [SamplingParams(extra_args={"other": 1}), SamplingParams()]
    first, second = (Client().generate("hello", request_id=name, sampling_params_list=given) for name in "ab")
    assert given[0].seed is None and given[0].extra_args == {"other": 1}
    assert first.stages[1] is given[1]
    if choice != "fresh":
        assert first.stages is second.stages is given
        assert not log
        return
    seeds = [call.stages[0].extra_args["tts_local_seed"] for call in (first, second)]
    assert seeds[0] != seeds[1] and all(0 <= seed < 2**63 for seed in seeds)
    assert [call.stages[0].seed for call in (first, second)] == seeds
    assert first.stages[0].extra_args["other"] == 1
    lines = [record.getMessage() for record in log]
    assert [re.findall(r"request (\w+): fresh seed (\d+) \(RNG scheme 1\)", line) for line in lines] == [
        [("a", str(seeds[0]))],
        [("b", str(seeds[1]))],
    ]


def test_a_seeded_request_keeps_its_seed_and_is_reported(choice, log):
    logging.getLogger("vllm.rowseed").setLevel(logging.DEBUG)
    given = [seeded(7), SamplingParams()]
    call = Client().generate("hello", request_id="r", sampling_params_list=given, priority=3)
    assert call.stages is given
    assert call.others == {"priority": 3}
    assert [record.getMessage() for record in log] == ["rowseed: request r: seed 7 (RNG scheme 1)"]


def test_the_stages_defaults_are_not_touched(choice):
    call = Client().generate("hello")
    assert all(params.seed is None and params.extra_args is None for params in Client.defaults)
    assert call.id
    assert (call.stages is None) == (choice != "fresh")
    if choice == "fresh":
        assert call.stages[0].seed is not None and call.stages[1] is Client.defaults[1]


DIFFUSION = SimpleNamespace(seed=None, extra_args=None, clone=lambda: None)


@pytest.mark.parametrize("stages", ["abc", [], [seeded("x")], {"seed": 1}, [DIFFUSION]], ids=repr)
def test_what_is_no_talkers_or_will_be_refused_goes_through_as_it_is(choice, stages):
    assert Client().generate("hello", sampling_params_list=stages).stages is stages


def test_one_bare_parameter_object_goes_through(choice):
    params = SamplingParams()
    call = Client().generate("hello", params)
    assert call.params is params and call.stages is None


def test_another_value_is_named_once_and_means_global(monkeypatch, log):
    monkeypatch.setenv("ROWSEED_UNSEEDED", "always")
    gives_fresh_seeds.cache_clear()
    assert not gives_fresh_seeds() and not gives_fresh_seeds()
    (line,) = [record.getMessage() for record in log]
    assert "ROWSEED_UNSEEDED" in line and "'always'" in line
    gives_fresh_seeds.cache_clear()


def test_the_real_client_is_joined():
    assert hasattr(AsyncOmni.generate, "__rowseed__")
    assert fresh_seeds.SEED_BITS == 63
