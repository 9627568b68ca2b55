"""Tell a speech request's client which seed the engine was given.

A response has the headers ``x-rowseed-seed`` (decimal, or ``none``) and ``x-rowseed-scheme``; events and
batch results have the same under ``rowseed``. It is the seed that reached the engine: one in the wrong place
of a request did not, and shows as ``none``.
"""

import functools
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rowseed.kernels.philox import SCHEME
from rowseed.vllm_omni.admission import guard_create_speech

SEED_HEADER, SCHEME_HEADER = "x-rowseed-seed", "x-rowseed-scheme"
FIELD = "rowseed"
NO_SEED = "none"
SAMPLED_BY_ROWSEED = "qwen3_tts"


class SeedNote:
    """The seed of one request's generation, once the engine has been asked for it.

    ``then`` is called at that moment. Of two generations for a request (vLLM-Omni repeats one that it finds
    incomplete) the last is what the client hears.
    """

    def __init__(self, then: Callable[[], Any] | None = None) -> None:
        self.seed: int | None = None
        self.known = False
        self._then = then

    def set(self, seed: int | None) -> None:
        self.seed, self.known = seed, True
        if self._then is not None:
            self._then()

    def __str__(self) -> str:
        return NO_SEED if self.seed is None else str(self.seed)

    def field(self) -> dict[str, str | int]:
        """For JSON. The seed is a string: many readers keep 53 bits of a number."""
        return {"seed": str(self), "scheme": SCHEME}


_current: ContextVar[SeedNote | None] = ContextVar("rowseed_seed_note", default=None)


def note_seed(seed: int | None) -> None:
    """Say which seed (None: unseeded) a generation gets, to whoever notes it in this context."""
    note = _current.get()
    if note is not None:
        note.set(seed)


@contextmanager
def noting(then: Callable[[], Any] | None = None) -> Iterator[SeedNote]:
    """A note of what generations asked for inside the block, and in tasks begun there, get."""
    note = SeedNote(then)
    token = _current.set(note)
    try:
        yield note
    finally:
        _current.reset(token)


def join_create_speech(create_speech: Callable) -> Callable:
    """``OmniOpenAIServingSpeech.create_speech`` that refuses bad seeds and reports the one it used."""
    guarded = guard_create_speech(create_speech)

    @functools.wraps(create_speech)
    async def create_speech_with_seed(self, request, raw_request=None):
        with noting() as note:
            response = await guarded(self, request, raw_request)
        headers = getattr(response, "headers", None)
        if headers is None or not note.known or not speaks_qwen3_tts(self):
            return response
        headers[SEED_HEADER] = str(note)
        headers[SCHEME_HEADER] = str(SCHEME)
        if response.media_type == "text/event-stream":
            response.body_iterator = _SeedInFirstEvent(response.body_iterator, note)
        return response

    return create_speech_with_seed


def speaks_qwen3_tts(service: Any) -> bool:
    """Whether rowseed draws for this service's model: it knows nothing of another's seeds."""
    return getattr(service, "_tts_model_type", None) == SAMPLED_BY_ROWSEED


class _SeedInFirstEvent:
    """Server-sent events, the first with the seed.

    No generator of its own: dropping or closing it ends the one inside at once, as without it.
    """

    def __init__(self, events: Any, note: SeedNote) -> None:
        self._events = events
        self._note: SeedNote | None = note

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        event = await self._events.__anext__()
        note, self._note = self._note, None
        return event if note is None else _with_field(event, note)

    async def aclose(self) -> None:
        await self._events.aclose()


def _with_field(event: str, note: SeedNote) -> str:
    before, mark, data = event.partition("data: ")
    payload = json.loads(data)
    return before + mark + json.dumps({**payload, FIELD: note.field()}, separators=(",", ":")) + "\n\n"
