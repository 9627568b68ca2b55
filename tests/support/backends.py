"""The backends of ``sample`` on CPU tensors: Triton's on the GPU where there is one, else interpreted."""

import numpy as np
import torch

from rowseed.kernels.sampling import Gather, sample


def _cuda(value):
    return value.cuda() if isinstance(value, torch.Tensor) else value


def _copy_back(moved, originals):
    for ours, theirs in zip(moved, originals, strict=True):
        if theirs is not None:
            theirs.copy_(ours)


class Torch:
    slow = False

    @staticmethod
    def sample(logits, streams, **kwargs):
        return sample(logits, streams, backend="torch", **kwargs)


class Numba:
    slow = False

    @staticmethod
    def sample(logits, streams, **kwargs):
        return sample(logits, streams, backend="numba", **kwargs)


class Triton:
    slow = not torch.cuda.is_available()

    @staticmethod
    def sample(logits, streams, *, out=None, status=None, logprob=None, gather=None, **kwargs):
        if Triton.slow:
            # float32 saturates where the scheme says so; numpy would warn.
            with np.errstate(all="ignore"):
                outputs = dict(out=out, status=status, logprob=logprob, gather=gather)
                return sample(logits, streams, backend="triton", **outputs, **kwargs)
        moved = dict(out=_cuda(out), status=_cuda(status), logprob=_cuda(logprob))
        moved["gather"] = gather and Gather(*map(_cuda, gather))
        kwargs = {name: _cuda(value) for name, value in kwargs.items()}
        codes = sample(_cuda(logits), _cuda(streams), backend="triton", **moved, **kwargs)
        _copy_back((moved["out"], moved["status"], moved["logprob"]), (out, status, logprob))
        if gather:
            _copy_back(moved["gather"], gather)
        return codes.cpu() if out is None else out


def on_device(function):
    """A function of ``device_functions`` on CPU tensors."""

    def call(*args):
        with np.errstate(all="ignore"):
            return function(*args) if Triton.slow else function(*map(_cuda, args)).cpu()

    return call
