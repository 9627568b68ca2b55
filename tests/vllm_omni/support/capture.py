"""What a CUDA graph would record of a call, seen on a CPU.

A graph replays the same kernels with the same addresses and the same numbers. So two calls can share a
graph if they run the same operators in the same order, every tensor they touch has the same address,
shape and strides, and every other argument is equal; and a capture succeeds if nothing synchronises.
Memory that a call allocates comes from the graph's own pool and keeps its place there: it is named by the
order of allocation.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

SYNCHRONISING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "item")


class Operator(NamedTuple):
    name: str
    tensors: tuple[tuple, ...]  # (place, shape, strides, dtype) of each argument
    others: tuple[str, ...]  # every other argument
    allocated: int  # results in storage that no argument has


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators: list[Operator] = []
        self._new: dict[int, int] = {}  # storage address: the how-manieth that this call allocated
        self._alive: list[Any] = []  # no address may be used twice within a call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given, _ = tree_flatten((args, kwargs))
        tensors = [value for value in given if isinstance(value, Tensor)]
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        results = [value for value in tree_flatten(result)[0] if isinstance(value, Tensor)]
        allocated = [value for value in results if value.untyped_storage().data_ptr() not in storages]
        self._alive.append(allocated)
        for value in allocated:
            self._new.setdefault(value.untyped_storage().data_ptr(), len(self._new))
        self.operators.append(
            Operator(
                str(func),
                tuple((self._place(t), tuple(t.shape), t.stride(), t.dtype) for t in tensors),
                tuple(repr(value) for value in given if not isinstance(value, Tensor)),
                len(allocated),
            )
        )
        return result

    def _place(self, tensor: Tensor) -> tuple[str, int] | int:
        storage = tensor.untyped_storage().data_ptr()
        if storage in self._new:
            return f"new {self._new[storage]}", tensor.data_ptr() - storage
        return tensor.data_ptr()


def record(call: Callable[[], Any]) -> list[Operator]:
    with _Recorder() as recorder:
        call()
    return recorder.operators


def differences(first: list[Operator], second: list[Operator]) -> list[str]:
    """Why a graph of the first call would not be one of the second."""
    if [operator.name for operator in first] != [operator.name for operator in second]:
        return [f"other operators: {len(first)} and {len(second)}"]
    return [
        f"{index} {a.name}: {a[1:]} then {b[1:]}"
        for index, (a, b) in enumerate(zip(first, second, strict=True))
        if a != b
    ]


def synchronising(operators: list[Operator]) -> list[str]:
    """Operators that wait for the device: a number or a size is read from it, or a copy made to the host."""
    return [operator.name for operator in operators if _synchronises(operator)]


def _synchronises(operator: Operator) -> bool:
    name = operator.name.split(".")[1]
    by_mask = name.startswith("index") and any(dtype == torch.bool for *_, dtype in operator.tensors)
    to_host = bool(operator.allocated) and "device(type='cpu')" in operator.others
    return name in SYNCHRONISING or by_mask or to_host


def allocating(operators: list[Operator]) -> list[str]:
    """Operators whose result is new memory. A kernel's own scratch is not seen."""
    return [operator.name for operator in operators if operator.allocated]
