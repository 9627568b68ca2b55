"""Clocks: the 20th percentile, median and 80th percentile of a call, on a CPU or a GPU."""

import contextlib
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

Call = Callable[[], object]


class Timing(NamedTuple):
    """Microseconds a call: 20th percentile, median, 80th percentile."""

    p20_us: float
    p50_us: float
    p80_us: float

    @classmethod
    def of(cls, microseconds: Iterable[float]) -> "Timing":
        ordered = sorted(microseconds)
        if not ordered:
            raise ValueError("a timing needs at least one sample, got none")
        p20, p50, p80 = (round(ordered[round(share * (len(ordered) - 1))], 3) for share in (0.2, 0.5, 0.8))
        return cls(p20, p50, p80)


def time_host(call: Call, *, budget_s: float = 0.2, least: int = 5) -> Timing:
    """Wall time of `call`, once a sample, for about `budget_s` and at least `least` times."""
    call()
    samples: list[float] = []
    end = time.perf_counter() + budget_s
    while len(samples) < least or (time.perf_counter() < end and len(samples) < 10_000):
        start = time.perf_counter_ns()
        call()
        samples.append((time.perf_counter_ns() - start) / 1000)
    return Timing.of(samples)


class HostClock:
    """Wall time on the CPU."""

    modes = ("eager",)
    calls_a_frame = 1

    def __init__(self, *, budget_s: float = 0.2) -> None:
        self.budget_s = budget_s

    def prepare(self, frame: Call, mode: str) -> Call:
        return frame

    def time(self, before: Call, frame: Call, mode: str) -> Timing:
        """Time of `before` and `frame` together."""
        return time_host(lambda: (before(), frame()), budget_s=self.budget_s)


class CudaClock:
    """Time between two CUDA events, eager or in a CUDA graph, with a warm or a cold L2 cache.

    A frame is `calls_a_frame` calls one after another, as the codes of a frame are drawn; times
    are divided by that number. An eager frame starts with an idle device, so the time holds what
    the host needs to launch. A graph is replayed behind other work on the device, so the time
    holds the device's part alone, save what the `before` of a frame costs the host beyond that.
    cold: a buffer of twice the cache's size is written before each sample.
    """

    modes = ("eager warm", "eager cold", "graph warm", "graph cold")
    calls_a_frame = 15
    warm_ups = 3
    busy_cycles = 200_000  # about 0.1 ms: longer than launching a graph takes

    def __init__(
        self, *, samples: int = 50, budget_s: float = 0.25, cuda: Any = torch.cuda, device: str = "cuda"
    ) -> None:
        self.samples, self.budget_s, self.cuda = samples, budget_s, cuda
        cache = cuda.get_device_properties(cuda.current_device()).L2_cache_size
        self.flush = torch.empty(2 * max(cache, 1 << 20), dtype=torch.int8, device=device)

    def prepare(self, frame: Call, mode: str) -> Call:
        """The frame itself, or the replay of a graph that holds it."""
        if not mode.startswith("graph"):
            return frame
        # Everything that compiles or allocates once does so on a side stream before the capture.
        stream = self.cuda.Stream()
        stream.wait_stream(self.cuda.current_stream())
        with self.cuda.stream(stream):
            for _ in range(self.warm_ups):
                frame()
        self.cuda.current_stream().wait_stream(stream)
        return self.capture(frame)

    def capture(self, frame: Call) -> Call:
        graph = self.cuda.CUDAGraph()
        with self.cuda.graph(graph):
            frame()
        return graph.replay

    def time(self, before: Call, frame: Call, mode: str) -> Timing:
        """Time of `before` and `frame` together; `frame` comes from `prepare` with the same mode.

        As many samples as `budget_s` allows, at least 9 and at most `samples`.
        """
        begin = time.perf_counter()
        for _ in range(self.warm_ups):
            before()
            frame()
        self.cuda.synchronize()
        once = (time.perf_counter() - begin) / max(self.warm_ups, 1)
        count = min(self.samples, max(9, round(self.budget_s / max(once, 1e-6))))
        events = [tuple(self.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(count)]
        for start, end in events:
            if mode.endswith("cold"):
                self.flush.zero_()
            if mode.startswith("graph"):
                self.cuda._sleep(self.busy_cycles)
            else:
                self.cuda.synchronize()
            start.record()
            before()
            frame()
            end.record()
        self.cuda.synchronize()
        return Timing.of(start.elapsed_time(end) * 1000 / self.calls_a_frame for start, end in events)


class PretendedClock(CudaClock):
    """CudaClock's code on a CPU, for a dry run: one sample, nothing captured. Its times mean nothing."""

    calls_a_frame = 2
    warm_ups = 0

    def __init__(self) -> None:
        super().__init__(samples=1, cuda=_pretended_cuda(), device="cpu")

    def capture(self, frame: Call) -> Call:
        super().capture(frame)
        return frame


def _pretended_cuda() -> SimpleNamespace:
    """What CudaClock needs of torch.cuda."""

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = time.perf_counter()

        def elapsed_time(self, end: "Event") -> float:
            return (end.at - self.at) * 1000

    stream = SimpleNamespace(wait_stream=lambda other: None)
    return SimpleNamespace(
        Event=Event,
        Stream=lambda: stream,
        stream=contextlib.nullcontext,
        current_stream=lambda: stream,
        current_device=lambda: 0,
        get_device_properties=lambda device: SimpleNamespace(L2_cache_size=1 << 20),
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: None),
        graph=contextlib.nullcontext,
        synchronize=lambda: None,
        _sleep=lambda cycles: None,
    )
