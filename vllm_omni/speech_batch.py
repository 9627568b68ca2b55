"""Seeds and ``extra_params`` of ``/v1/audio/speech/batch``, which vLLM-Omni drops.

Both may stand in the batch, for all items, and in an item, whose own win. An item without a seed in a batch
with one gets `rowseed.kernels.streams.item_seed` of the batch's seed and its index. Each result says what
its item was given, so that it can be asked for again alone.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

from rowseed.kernels.streams import check_seed, item_seed
from rowseed.vllm_omni.admission import check_speech
from rowseed.vllm_omni.extra_args import SEED_ARG
from rowseed.vllm_omni.seed_report import FIELD, SeedNote, noting, speaks_qwen3_tts

logger = logging.getLogger("vllm.rowseed")

_http_request: ContextVar[Any] = ContextVar("rowseed_http_request", default=None)


class ItemFields(NamedTuple):
    """What an item's request gets, or why it is refused."""

    seed: int | None = None
    extra_params: dict[str, Any] | None = None
    error: str | None = None


def join_speech_service(find: Callable) -> Callable:
    """``api_server.Omnispeech``, which every speech route asks for its handler with the HTTP request.

    The batch's handler gets the parsed body only, without the fields that its model does not know.
    """

    @functools.wraps(find)
    def speech_service(request):
        _http_request.set(request)
        return find(request)

    return speech_service


def join_create_speech_batch(create_speech_batch: Callable) -> Callable:
    """``OmniOpenAIServingSpeech.create_speech_batch`` whose items have seeds and ``extra_params``."""

    @functools.wraps(create_speech_batch)
    async def create_speech_batch_with_seeds(self, batch_request):
        from vllm_omni.errors import OmniClientError

        if not speaks_qwen3_tts(self):
            return await create_speech_batch(self, batch_request)
        try:
            items = read_items(await _body(), len(batch_request.items))
        except OmniClientError as error:
            return self.create_error_response(error.message)
        service = _SeededItems(self, items)
        response = await create_speech_batch(service, batch_request)
        return _report(response, service.notes) if hasattr(response, "results") else response

    return create_speech_batch_with_seeds


async def _body() -> Mapping[str, Any]:
    request = _http_request.get()
    if request is None:
        _warn_of_dropped_fields()
        return {}
    return await request.json()


@functools.cache
def _warn_of_dropped_fields() -> None:
    logger.warning("rowseed cannot read speech batches' bodies: their seeds and extra_params are dropped")


def read_items(body: Mapping[str, Any], count: int) -> list[ItemFields]:
    """The fields of a batch's ``count`` items from its JSON.

    Raises:
        vllm_omni.errors.OmniClientError: the batch's own ``seed`` or ``extra_params`` is bad, by name. An
            item's is in that item's ``error``.
    """
    seed, params = body.get("seed"), body.get("extra_params")
    check_speech(seed, params)
    if seed is None and params:
        seed = params.get(SEED_ARG)
    items = body.get("items") or [{}] * count
    return [_read_item(index, item, seed, params) for index, item in enumerate(items)]


def _read_item(index: int, item: Mapping[str, Any], batch_seed: int | None, batch_params: Any) -> ItemFields:
    from vllm_omni.errors import OmniClientError

    seed, params = item.get("seed"), item.get("extra_params")
    try:
        check_speech(seed, params)
    except OmniClientError as error:
        return ItemFields(error=error.message)
    if seed is None and params:
        seed = params.get(SEED_ARG)
    if seed is not None:
        seed = check_seed(seed)
    elif batch_seed is not None:
        seed = item_seed(batch_seed, index)
    return ItemFields(seed, {**(batch_params or {}), **(params or {})} or None)


class _SeededItems:
    """The speech service as its batch handler sees it: every item's request with its fields."""

    def __init__(self, service: Any, items: list[ItemFields]) -> None:
        self._service = service
        self._items = items
        self._requests: list[Any] = []
        self.notes: dict[int, SeedNote] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    def _merge_batch_item(self, batch: Any, item: Any) -> Any:
        request = self._service._merge_batch_item(batch, item)
        fields = self._items[len(self._requests)]
        request.seed, request.extra_params = fields.seed, fields.extra_params
        self._requests.append(request)
        return request

    def _validate_tts_request(self, request: Any) -> str | None:
        return self._items[self._index(request)].error or self._service._validate_tts_request(request)

    async def _generate_audio_bytes(self, request: Any, **options: Any) -> Any:
        with noting() as self.notes[self._index(request)]:
            return await self._service._generate_audio_bytes(request, **options)

    def _index(self, request: Any) -> int:
        return next(index for index, known in enumerate(self._requests) if known is request)


def _report(response: Any, notes: Mapping[int, SeedNote]) -> Any:
    batch, result = _response_models()
    results = [
        result(**dict(each), **({FIELD: notes[each.index].field()} if _known(notes, each.index) else {}))
        for each in response.results
    ]
    return batch(**{**dict(response), "results": results})


def _known(notes: Mapping[int, SeedNote], index: int) -> bool:
    return index in notes and notes[index].known


@functools.cache
def _response_models() -> tuple[Any, Any]:
    """vLLM-Omni's response and result with one field more: what a model does not know is not written."""
    from pydantic import create_model
    from vllm_omni.entrypoints.openai.protocol.audio import BatchSpeechResponse, SpeechBatchItemResult

    field: Any = {FIELD: (dict[str, Any] | None, None)}
    result: Any = create_model("SeededItemResult", __base__=SpeechBatchItemResult, **field)
    batch = create_model("SeededBatchResponse", __base__=BatchSpeechResponse, results=(list[result], ...))
    return batch, result
