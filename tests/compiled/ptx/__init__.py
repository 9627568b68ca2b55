"""Runs PTX without a GPU, in numpy: every thread of a launch, with the checks that hardware leaves out.

    memory = GlobalMemory()
    address = memory.add(array)
    counts, ready = run(Program(ptx), (8,), [address, 5, 1.0], memory, shared_bytes=1024)

Threads are elements of arrays. `parse` reads the text; `formats` and `arithmetic` say what one instruction
computes, on arrays alone; `memory` holds global and shared memory: bounds, what is initialised, who touched
what; `warp` has the instructions in which lanes meet; `decode` binds instructions to registers; `block` steps
threads, warps and blocks, barriers included; `counts` is what comes out.

It raises `Fault` for what no program may do, `UnknownInstruction` for what is not modelled. It is silent
about time, and approximate functions are rounded correctly here, as hardware does not (`Counts.free`).
"""

from .block import Code, run
from .counts import Counts
from .errors import Fault, UnknownInstruction
from .memory import GlobalMemory
from .parse import Program

__all__ = ["Code", "Counts", "Fault", "GlobalMemory", "Program", "UnknownInstruction", "run"]
