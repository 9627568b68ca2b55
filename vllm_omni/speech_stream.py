"""The WebSocket's seed: refused by name where it is bad, reported in each ``audio.start``."""

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from rowseed.vllm_omni.admission import check_speech
from rowseed.vllm_omni.seed_report import FIELD, SeedNote, noting, speaks_qwen3_tts

POLICY_VIOLATION = 1008  # RFC 6455


def guard_build_config(build_config: Callable) -> Callable:
    """``OmniStreamingSpeechHandler._build_config`` that checks the seed as the client wrote it."""

    @functools.wraps(build_config)
    async def guarded_build_config(self, websocket, msg):
        from vllm_omni.errors import OmniClientError

        try:
            check_speech(msg.get("seed"))
        except OmniClientError as error:
            await self._send_error(websocket, error.message)
            return None
        return await build_config(self, websocket, msg)

    return guarded_build_config


def join_handle_session(handle_session: Callable) -> Callable:
    """``OmniStreamingSpeechHandler.handle_session`` that ends with a close frame.

    vLLM-Omni returns from a session that it refuses; the connection is then cut, and a client that was still
    sending may never read the error event.
    """

    @functools.wraps(handle_session)
    async def handle_session_to_its_end(self, websocket):
        from starlette.websockets import WebSocketState

        await handle_session(self, websocket)
        if websocket.application_state == websocket.client_state == WebSocketState.CONNECTED:
            await websocket.close(POLICY_VIOLATION)

    return handle_session_to_its_end


def join_generate_and_send(generate_and_send: Callable) -> Callable:
    """``OmniStreamingSpeechHandler._generate_and_send`` whose ``audio.start`` has the seed."""

    @functools.wraps(generate_and_send)
    async def generate_and_send_with_seed(self, websocket, config, sentence_text, **indices):
        if not speaks_qwen3_tts(self._speech_service):
            return await generate_and_send(self, websocket, config, sentence_text, **indices)
        start = _StartWithSeed(websocket)
        with noting(start.begin) as start.note:
            return await generate_and_send(self, start, config, sentence_text, **indices)

    return generate_and_send_with_seed


class _StartWithSeed:
    """A WebSocket that keeps ``audio.start`` until the seed is known.

    vLLM-Omni sends that event before it asks the engine. Here it leaves as soon as the engine has been asked,
    and before anything else does.
    """

    note: SeedNote

    def __init__(self, websocket: Any) -> None:
        self._websocket = websocket
        self._start: dict[str, Any] | None = None
        self._sending: asyncio.Future | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._websocket, name)

    def begin(self) -> None:
        """Send the event that is kept, if one is, without waiting for it."""
        start, self._start = self._start, None
        if start is not None:
            if self.note.known:
                start = {**start, FIELD: self.note.field()}
            self._sending = asyncio.ensure_future(self._websocket.send_json(start))

    async def send_json(self, data: Any) -> None:
        if data.get("type") == "audio.start":
            self._start = data
            return
        await self._started()
        await self._websocket.send_json(data)

    async def send_bytes(self, data: bytes) -> None:
        await self._started()
        await self._websocket.send_bytes(data)

    async def _started(self) -> None:
        self.begin()
        if self._sending is not None:
            await self._sending
