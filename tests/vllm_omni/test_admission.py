"""Bad seeds and parameters are refused at both doors, for that request alone, by name and value."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest
from vllm import SamplingParams
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm_omni.entrypoints.omni_base import OmniBase
from vllm_omni.errors import OmniClientError

from rowseed.vllm_omni.admission import check_request, guard_create_speech
from rowseed.vllm_omni.extra_args import Parameters, read_parameters, read_row, stage_parameters
from rowseed.vllm_omni.metrics import counters

BAD_SEEDS = [-(2**63) - 1, 2**64, 10**20, "42", "abc", 4.2, 4.0, True]
GOOD_SEEDS = [0, -1, 42, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
NAN, INF = float("nan"), float("inf")
BAD_VALUES = {
    "subtalker_temperature": (-1, -1e-9, NAN, INF, 1e39, "0.9", True, []),
    "subtalker_top_k": (2.5, True, "50", NAN),
    "subtalker_top_p": (-0.1, 1.5, NAN, "1", False),
    "subtalker_do_sample": (1, "true", 0.0),
}
BAD_PARAMETERS = [(key, value) for key, values in BAD_VALUES.items() for value in values]


@pytest.mark.parametrize("seed", GOOD_SEEDS)
def test_good_seeds_pass(seed):
    check_request({"tts_local_seed": seed, "tts_local_offset": seed})


@pytest.mark.parametrize("key", ["tts_local_seed", "tts_local_offset"])
@pytest.mark.parametrize("seed", BAD_SEEDS)
def test_bad_seeds_are_refused(key, seed):
    refused = counters().refused
    with pytest.raises(OmniClientError) as error:
        check_request({key: seed})
    assert error.value.status_code == 400
    assert key in str(error.value) and repr(seed) in str(error.value)
    assert counters().refused == refused + 1


@pytest.mark.parametrize("key, value", BAD_PARAMETERS)
def test_bad_parameters_are_refused(key, value):
    with pytest.raises(OmniClientError) as error:
        check_request({"tts_local_seed": 1, key: value})
    assert key in str(error.value) and repr(value) in str(error.value)


@pytest.mark.parametrize("key", ["subtalker_temperature", "subtalker_top_p"])
@pytest.mark.parametrize("value", [10**400, -(10**5000)], ids=["1e400", "-1e5000"])
def test_integers_that_no_float_holds_are_refused_by_name(key, value):
    with pytest.raises(OmniClientError, match=key):
        check_request({key: value})


def test_other_keys_and_no_keys_are_nobodys_business():
    check_request(None)
    check_request({})
    check_request({"tts_local_seed": None, "subtalker_top_k": None, "something": "else", "seed": "x"})


def test_parameters_are_read_over_the_defaults():
    defaults = Parameters(0.7, 20, 0.9)
    assert read_row(None, defaults) == (None, 0, defaults)
    given = {"subtalker_temperature": 1, "subtalker_top_k": -1, "subtalker_top_p": 0}
    assert read_parameters(given, defaults) == (1.0, 0, 0.0)
    assert read_parameters({"subtalker_top_k": 10**12}, defaults).top_k == 2**31 - 1
    greedy = {"subtalker_do_sample": False, "subtalker_temperature": 2.0}
    assert read_parameters(greedy, defaults).temperature == 0
    assert read_parameters({"subtalker_do_sample": True}, defaults) == defaults


def test_stage_parameters():
    assert stage_parameters(None) == stage_parameters({}) == (0.9, 50, 1.0)
    assert stage_parameters({"temperature": 0.5, "top_k": None, "do_sample": True}) == (0.5, 50, 1.0)
    assert stage_parameters({"temperature": -1}).temperature == 0
    assert stage_parameters({"do_sample": False}).temperature == 0
    with pytest.raises(TypeError, match="top_k"):
        stage_parameters({"top_k": "many"})


def client(stages=2):
    base = object.__new__(OmniBase)
    base.engine = SimpleNamespace(num_stages=stages)
    base.default_sampling_params_list = [params() for _ in range(stages)]
    base.sampling_constraints_list = [{} for _ in range(stages)]
    return base


def params(seed=None, **extra_args):
    return SimpleNamespace(seed=seed, extra_args=extra_args or None)


@pytest.mark.parametrize("seed", BAD_SEEDS)
def test_the_clients_door_refuses_bad_seeds(seed):
    mappings = {"seed": seed}, {"extra_args": {"tts_local_seed": seed}}
    for bad in (params(seed), params(1, tts_local_seed=seed), *mappings):
        with pytest.raises(OmniClientError, match="seed"):
            client().resolve_sampling_params_list([bad, params()])


@pytest.mark.parametrize("key", ["temperature", "top_p", "top_k"])
def test_a_bool_that_the_wire_would_not_take_is_refused_at_both_doors(key):
    bad = SamplingParams()
    setattr(bad, key, True)  # as the speech endpoint does with extra_params
    bad._verify_args()
    with pytest.raises(msgspec.ValidationError):
        MsgpackDecoder(SamplingParams).decode(MsgpackEncoder().encode(bad))
    with pytest.raises(OmniClientError, match=f"{key} must be a number, got True"):
        client().resolve_sampling_params_list([bad, params()])
    kind, message = http({"extra_params": {key: True}}, None)
    assert kind == "error" and key in message


def test_the_v2_runners_sampler_takes_only_int64_seeds():
    v2 = SimpleNamespace(model_config=SimpleNamespace(use_v2_model_runner=True))
    v1 = SimpleNamespace(engine_args={"use_v2_model_runner": False})
    base = client()
    base.engine.stage_configs = [v2, v1]
    with pytest.raises(OmniClientError, match=r"seed must be below 2\*\*63"):
        base.resolve_sampling_params_list([params(2**63), params()])
    base.resolve_sampling_params_list([params(2**63 - 1, tts_local_seed=2**63), params(2**63)])


def test_the_clients_door_passes_good_lists_and_defaults():
    given = [params(7, tts_local_seed=7, subtalker_top_k=3), params()]
    assert list(client().resolve_sampling_params_list(given)) == given
    assert len(client().resolve_sampling_params_list(None)) == 2


class Body:
    def __init__(self, body):
        self._body = body

    async def json(self):
        if isinstance(self._body, Exception):
            raise self._body
        return self._body


class Server:
    """What the HTTP handler needs of OmniOpenAIServingSpeech."""

    def create_error_response(self, message):
        return ("error", message)

    @guard_create_speech
    async def create_speech(self, request, raw_request=None):
        return ("speech", request.seed)


def http(body, parsed_seed):
    """POST ``body``; pydantic made ``parsed_seed`` of its seed."""
    speech = SimpleNamespace(seed=parsed_seed, extra_params=body.get("extra_params"))
    return asyncio.run(Server().create_speech(speech, Body(body)))


@pytest.mark.parametrize("seed, parsed", [("42", 42), (True, 1), (4.0, 4)])
def test_the_http_door_sees_what_pydantic_made_an_int(seed, parsed):
    kind, message = http({"seed": seed}, parsed)
    assert kind == "error"
    assert "seed" in message and repr(seed) in message


@pytest.mark.parametrize("extra", [{"tts_local_seed": "abc"}, {"subtalker_top_p": 2}])
def test_the_http_door_checks_extra_params(extra):
    kind, message = http({"extra_params": extra}, None)
    assert kind == "error"
    assert next(iter(extra)) in message


def test_the_http_door_passes_good_requests():
    assert http({"seed": 7}, 7) == ("speech", 7)
    assert http({"seed": -1, "extra_params": {"subtalker_top_k": 5}}, -1) == ("speech", -1)
    assert http({}, None) == ("speech", None)
    unreadable = SimpleNamespace(seed=3, extra_params=None)
    assert asyncio.run(Server().create_speech(unreadable, Body(ValueError("no JSON")))) == ("speech", 3)
    assert asyncio.run(Server().create_speech(unreadable)) == ("speech", 3)


def test_the_real_handler_is_guarded():
    from vllm_omni.entrypoints.openai.serving_speech import OmniOpenAIServingSpeech

    assert hasattr(OmniOpenAIServingSpeech.create_speech, "__rowseed__")
    assert hasattr(OmniBase.resolve_sampling_params_list, "__rowseed__")
