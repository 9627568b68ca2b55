"""A tiny talker, a model of the scheduler and the oracle, shared by the state machines of both runners.

The talker is the real ``SeededTalker`` with a stand-in for its code predictor, whose logits depend on the
request and the frame alone: the request's key comes in as code 0, the frame in its hidden state. So a code
can change only if a seed, an offset, a parameter or a row went wrong.
"""

import gc
import logging
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn
from vllm.sampling_params import SamplingParams

from rowseed.kernels.sampling import sample
from rowseed.kernels.streams import INACTIVE, SEEDED, RowStreams
from rowseed.vllm_omni.extra_args import Parameters, read_row
from rowseed.vllm_omni.model_executor.models.qwen3_tts.talker import SeededTalker
from rowseed.vllm_omni.worker import row_packing
from rowseed.vllm_omni.worker.flagged_rows import Once

HIDDEN, GROUPS, VOCABULARY = 4, 4, 32
MAX_ROWS, MAX_TOKENS = 4, 64
FRAMES = 64
BOUNDED = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
STAGE = Parameters(0.9, 20, 1.0)

NAN_KEYS = (3, 7, 15)
"""Keys of the requests whose logits hold a NaN."""

_logits = torch.randn(
    VOCABULARY, FRAMES, GROUPS - 1, VOCABULARY, generator=torch.Generator().manual_seed(1)
).mul(2)

_logits[list(NAN_KEYS), :, 1, 5] = torch.nan

CODE0_LOGITS = torch.randn(VOCABULARY, FRAMES, VOCABULARY, generator=torch.Generator().manual_seed(2)).mul(2)


class Predictor(nn.Module):
    """Stands for the code predictor, and keeps the streams of its last call."""

    def __init__(self):
        super().__init__()
        self.stacked_codec_embedding = torch.zeros(GROUPS - 1, VOCABULARY, HIDDEN)
        self.status = torch.zeros(MAX_ROWS, GROUPS, dtype=torch.int32)
        self.streams, self.frame_sum = None, None

    def forward(self, layer0_code, layer0_embed, last_talker_hidden, *, temperature, top_k, top_p, streams):
        rows = layer0_code.shape[0]
        frames = last_talker_hidden[:, 0, 0].long()
        self.streams = streams.clone()
        codes = torch.empty(rows, GROUPS, dtype=torch.long)
        codes[:, :1] = layer0_code
        logits = _logits[layer0_code[:, 0], frames]
        sample(
            logits,
            streams,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            codebook=1,
            out=codes[:, 1:],
            status=self.status[:rows, 1:],
        )
        self.frame_sum = torch.zeros(rows, HIDDEN)
        return codes


class Talker(SeededTalker):
    """SeededTalker without weights."""

    has_preprocess = True
    talker_mtp_output_key = mtp_output_key = ("codes", "audio")
    talker_mtp_graph_safe = mtp_graph_safe = True
    gpu_resident_buffer_keys = frozenset({("codes", "audio")})
    preprocess_batch_mrv2 = None

    def __init__(self):
        nn.Module.__init__(self)
        self.code_predictor = Predictor()
        self.talker_config = SimpleNamespace(num_code_groups=GROUPS, hidden_size=HIDDEN)
        self._embedding_dtype = torch.float32
        self._codebook_vocab_size = VOCABULARY
        self._subtalker_sampling_params = self.mtp_sampling_params = STAGE._asdict()
        self.mtp_sample_uniforms = False

    def embed_input_ids(self, ids):
        return torch.zeros(ids.shape[0], HIDDEN)

    def preprocess(self, ids, embeds, **_):
        return ids, embeds, {}


class GraphWrapper:
    """Stands for a captured graph: it replays over the bound tensors, whatever the keyword arguments say."""

    def __init__(self, runnable, vllm_config=None, runtime_mode=None):
        self.runnable = runnable

    def __call__(self, ids, embeds, hidden, text, **_):
        return self.runnable(ids, embeds, hidden, text)


def bucket(rows):
    return next(size for size in (1, 2, 4) if size >= rows)


class ExtraArgs(dict):
    """A dict that can be watched until it is freed."""


@dataclass(eq=False)
class Request:
    """What the scheduler knows of a request, and nothing that it told the runner."""

    name: str
    key: int
    prompt_len: int
    extra_args: ExtraArgs | None
    seed: int | None = None  # SamplingParams.seed
    outputs: list[int] = field(default_factory=list)
    computed: int = 0
    known_to_runner: bool = False
    preempted: bool = False
    scheduled_before: bool = False

    @property
    def remaining(self):
        return self.prompt_len + len(self.outputs) - self.computed

    @property
    def frame(self):
        """Index of the generated token that the request's next one-token step reads."""
        return self.computed - self.prompt_len

    @property
    def greedy(self):
        return self.key % 5 == 4

    def row(self):
        try:
            return read_row(self.extra_args, STAGE)
        except (TypeError, ValueError):
            return read_row(None, STAGE)

    def line(self, seed, frame):
        """What is packed of the request: seed, offset."""
        _, base, _ = self.row()
        return seed, (frame + base + 2**63) % 2**64 - 2**63

    def code0_seed(self):
        return self.row().seed if self.seed is None else self.seed

    def sampling_params(self):
        return SamplingParams(
            extra_args=self.extra_args,
            seed=self.seed,
            temperature=0.0 if self.greedy else 1.0,
            top_k=0 if self.greedy else 20,
            max_tokens=MAX_TOKENS,
        )


def alone(request, header, row):
    """The frame's codes [GROUPS] of a request by itself, in a batch of one.

    Where it has no seed, header and row give the address on the global stream.
    """
    seed, base, parameters = request.row()
    if seed is None:
        streams = RowStreams(1, "cpu", global_seed=header[0], global_offset=header[1] + row)
        lines = streams.pack([None], [0])
    else:
        lines = RowStreams(1, "cpu").pack([seed], [(request.frame + base + 2**63) % 2**64 - 2**63])
    temperature, top_k, top_p = parameters
    codes = sample(
        _logits[request.key, request.frame][None],
        lines,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        codebook=1,
    )
    return [request.key, *codes[0].tolist()]


def code0_alone(request, frame, header, row):
    """Code 0 of a request's frame in a batch of one; without a seed, at the address of header and row."""
    logits = CODE0_LOGITS[request.key, frame]
    if request.greedy:
        return int(logits.argmax())
    seed, offset = request.line(request.code0_seed(), frame)
    if seed is None:
        streams = RowStreams(1, "cpu", global_seed=header[0], global_offset=header[1] + row)
        lines = streams.pack([None], [0])
    else:
        lines = RowStreams(1, "cpu").pack([seed], [offset])
    return int(sample(logits[None], lines, top_k=20, codebook=0))


SEEDS = st.sampled_from([None, None, 0, 1, 1, 2**63, -1])
BAD = ({"tts_local_seed": "abc"}, {"tts_local_seed": True}, {"subtalker_top_k": 2.5})


@st.composite
def extra_args(draw):
    if draw(st.integers(0, 9)) == 0:
        return ExtraArgs(draw(st.sampled_from(BAD)))
    args = ExtraArgs()
    seed = draw(SEEDS)
    if seed is not None:
        args["tts_local_seed"] = seed
    if draw(st.booleans()):
        args["tts_local_offset"] = draw(st.sampled_from([0, 5, 2**31 - 1, -1, 2**63 - 2]))
    if draw(st.booleans()):
        args |= {"subtalker_temperature": draw(st.sampled_from([0, 0.5, 1.0])), "subtalker_top_p": 0.9}
    return args


class Lifecycle(RuleBasedStateMachine):
    """Requests come, decode, pause, are preempted, resume, move, end and are aborted; ids are used again.

    A subclass drives one runner: ``start(graph)``, ``run_step(scheduled)``, which returns the requests that
    had an MTP step in row order, ``codes(request)``, and ``held()``.
    """

    def __init__(self):
        super().__init__()
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.finished: set[str] = set()
        self.keys = 0
        self.watched: list[tuple[str, weakref.ref]] = []
        self.used: set[int] = set()
        self.code0_used: set[int] = set()
        self.bad: set[str] = set()
        self.sampled_nan: set[str] = set()
        self.spoken: dict[tuple[int, int], list[int]] = {}
        row_packing._once = Once()
        # Log records that a handler keeps would hold the refused values.
        logging.getLogger("vllm.rowseed").setLevel(logging.CRITICAL)

    @initialize(graph=st.booleans(), asynchronous=st.booleans())
    def begin(self, graph, asynchronous):
        self.graph, self.asynchronous = graph, asynchronous
        self.start(graph)
        gc.freeze()  # what is there already need not be searched at the end of every example

    # Rules

    @rule(
        name=st.sampled_from("abcdef"),
        prompt_len=st.integers(1, 5),
        args=extra_args(),
        seed=st.sampled_from([None, None, 3]),
    )
    def admit(self, name, prompt_len, args, seed=None):
        if name in {request.name for request in self.running + self.waiting}:
            return
        args = ExtraArgs(args)  # hypothesis keeps what it drew
        request = Request(name, self.keys % VOCABULARY, prompt_len, args, seed)
        self.keys += 1
        self.waiting.append(request)
        self.watched.append((name, weakref.ref(args)))
        if dict(args) in BAD:
            self.bad.add(name)

    @rule(chunk=st.integers(1, 4), steps=st.integers(1, 4), paused=st.none() | st.integers(0, MAX_ROWS - 1))
    def step(self, chunk, steps, paused):
        for _ in range(steps):
            self._step(chunk, paused)
            paused = None

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, MAX_ROWS - 1))
    def finish_or_abort(self, index):
        request = self.running.pop(index % len(self.running))
        if request.known_to_runner:
            self.finished.add(request.name)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, MAX_ROWS - 1))
    def preempt(self, index):
        request = self.running.pop(index % len(self.running))
        request.computed, request.preempted, request.scheduled_before = 0, True, False
        self.waiting.insert(0, request)

    @rule(i=st.integers(0, MAX_ROWS - 1), j=st.integers(0, MAX_ROWS - 1))
    def rows_swap(self, i, j):
        self.swap_rows(i, j)

    # One scheduler step

    def _step(self, chunk, paused):
        while self.waiting and len(self.running) < MAX_ROWS:
            self.running.append(self.waiting.pop(0))
        scheduled = {
            request: min(request.remaining, chunk)
            for index, request in enumerate(self.running)
            if index != paused
        }
        before = self.streams().global_offset
        self.predictor().streams = None
        rows = self.run_step(scheduled)
        self.finished.clear()
        expected = {request for request, tokens in scheduled.items() if tokens == 1 and request.frame >= 0}
        assert set(rows) == expected
        self._check(rows, self.advanced(before))
        for request, tokens in scheduled.items():
            request.known_to_runner, request.preempted = True, False
            request.computed += tokens
            if request.remaining == 0 and request.prompt_len + len(request.outputs) < MAX_TOKENS - 1:
                request.outputs.append(request.key)
                self.sampled(request, -1 if self.asynchronous else request.key)
        for request in [r for r in self.running if r.remaining == 0]:  # reached the longest speech
            self.running.remove(request)
            self.finished.add(request.name)
        for request in self.running:
            request.scheduled_before = request in scheduled

    def _check(self, rows, advanced):
        streams = self.predictor().streams
        if not rows:
            assert streams is None
            assert advanced == 0
            return
        padded = bucket(len(rows)) if self.graph else len(rows)
        assert streams.shape[0] == padded + 1
        header, lines = streams[0].tolist(), streams[1:].tolist()
        assert header[2] == len(rows)
        assert advanced == self.lines_packed(rows)
        for row, request in enumerate(rows):
            assert lines[row][2] & INACTIVE == 0
            codes = self.codes(request)
            if request.key in NAN_KEYS:
                self.sampled_nan.add(request.name)
            assert codes == alone(request, header, row), (request, row)
            if lines[row][2] & SEEDED:
                # Whenever the same frame comes again (after a preemption), it is the same.
                assert self.spoken.setdefault((request.key, request.frame), codes) == codes
            else:
                assert header[1] + row not in self.used
                self.used.add(header[1] + row)

    # Invariants

    @invariant()
    def only_the_guilty_are_named(self):
        """Bad arguments, and rows whose logits hold a NaN; and those as soon as they have had a frame."""
        assert row_packing._once._met <= self.bad
        assert self.flagged_rows()._once._met == self.sampled_nan

    def teardown(self):
        logging.getLogger("vllm.rowseed").setLevel(logging.NOTSET)
        if not hasattr(self, "graph"):
            return
        try:
            self.finished |= {r.name for r in self.running + self.waiting if r.known_to_runner}
            self.running.clear()
            self.waiting.clear()
            self.run_step({})
            assert self.held() == []
            gc.collect()
            assert [name for name, ref in self.watched if ref() is not None] == []
        finally:
            gc.unfreeze()
            self.stop()

    def flagged_rows(self):
        return self.talker().talker_mtp_flagged_rows

    def streams(self):
        return self.talker().talker_mtp_row_streams

    def predictor(self):
        return self.talker().code_predictor

    def swap_rows(self, i, j):
        """Only where the runner can."""

    def sampled(self, request, token):
        """A token of the request is known to the host (-1: not yet, as under async scheduling)."""

    def advanced(self, before):
        """How far the residual codes' step has moved the global stream."""
        return self.streams().global_offset - before

    def check_code0(self, sampled, requests, frames, header):
        """Every code 0 of a step, against the request alone; an unseeded row's address is used once."""
        for row, (request, frame) in enumerate(zip(requests, frames, strict=True)):
            assert sampled[row] == code0_alone(request, frame, header, row), (request, frame, row)
            assert header[1] + row not in self.code0_used
            self.code0_used.add(header[1] + row)

    def lines_packed(self, rows):
        return bucket(len(rows)) if self.graph else len(rows)
