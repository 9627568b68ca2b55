"""Runs the Triton code for tests: on the GPU where there is one, else in Triton's interpreter.

The interpreter must be chosen before triton is imported and would reach into every other test of the
process and into the engines that tests start, so it lives in a process of its own.
"""

import io
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

MUTATED = ("out", "status", "total", "next_input")


def _dump(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)  # keeps views and strides, unlike pickled numpy arrays
    return buffer.getvalue()


def _load(data):
    return torch.load(io.BytesIO(data))


def _quiet():
    import numpy as np

    # float32 saturates where the scheme says so; numpy would warn.
    np.seterr(all="ignore")
    torch.set_num_threads(1)


def _sample(data):
    from rowseed.kernels.sampling import Gather, sample

    kwargs = _load(data)
    gather = kwargs.pop("gather")
    if gather is not None:
        gather = Gather(*gather)
    out = sample(**kwargs, gather=gather, backend="triton")
    total, next_input = (None, None) if gather is None else (gather.total, gather.next_input)
    return _dump((out, kwargs.get("status"), total, next_input))


def _device_function(name, data):
    import device_functions

    return _dump(getattr(device_functions, name)(*_load(data)))


class TritonWorker:
    """``sample`` and the device functions, on CPU tensors in and out."""

    def __init__(self):
        self._pool = None
        self.slow = not torch.cuda.is_available()

    def _submit(self, function, *args):
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_quiet)
            os.environ["TRITON_INTERPRET"] = "1"
            try:
                self._pool.submit(os.getpid).result()
            finally:
                del os.environ["TRITON_INTERPRET"]
        return _load(self._pool.submit(function, *args).result())

    def sample(self, logits, streams, *, out=None, status=None, gather=None, **kwargs):
        if torch.cuda.is_available():
            return self._sample_on_gpu(logits, streams, out, status, gather, kwargs)
        arguments = dict(kwargs, logits=logits, streams=streams, out=out, status=status)
        arguments["gather"] = None if gather is None else tuple(gather)
        results = self._submit(_sample, _dump(arguments))
        return self._copy_back(results, out, status, gather)

    @staticmethod
    def _sample_on_gpu(logits, streams, out, status, gather, kwargs):
        from rowseed.kernels.sampling import Gather, sample

        def cuda(x):
            return x.cuda() if isinstance(x, torch.Tensor) else x

        device_out, device_status = cuda(out), cuda(status)
        device_gather = None if gather is None else Gather(*map(cuda, gather))
        drawn = sample(
            cuda(logits),
            cuda(streams),
            out=device_out,
            status=device_status,
            gather=device_gather,
            backend="triton",
            **{name: cuda(value) for name, value in kwargs.items()},
        )
        _, total, _, next_input = device_gather or (None,) * 4
        results = drawn.cpu(), device_status, total, next_input
        return TritonWorker._copy_back(results, out, status, gather)

    @staticmethod
    def _copy_back(results, out, status, gather):
        drawn, new_status, total, next_input = results
        if status is not None:
            status.copy_(new_status)
        if gather is not None:
            gather.total.copy_(total)
            if gather.next_input is not None:
                gather.next_input.copy_(next_input)
        return drawn if out is None else out.copy_(drawn)

    def device_function(self, name, *tensors):
        if torch.cuda.is_available():
            import device_functions

            moved = [t.cuda() if isinstance(t, torch.Tensor) else t for t in tensors]
            return getattr(device_functions, name)(*moved).cpu()
        return self._submit(_device_function, name, _dump(tensors))

    def close(self):
        if self._pool is not None:
            self._pool.shutdown()
