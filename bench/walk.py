"""What one warp executes: a walk over the control flow of a compiled kernel.

The listing (NVIDIA: ``nvdisasm -c -gi``; AMD: the assembly that LLVM prints) is cut into basic blocks,
and one path through them is chosen, entry to exit. At a branch the first rule that applies decides:

1. It never enters a call: on NVIDIA the slow half of the IEEE division (subnormal operands) and the
   shuffle fallback of a diverged warp (``BRA.DIV``).
2. It never enters a block that holds an instruction of a function named in ``off``: the caller's list of
   functions that the described case does not run (line tables tell which function an instruction comes from,
   inlining included. Some of Triton's releases drop the outer functions of most instructions, so one that
   is named must do).
3. It enters a block that holds an instruction of a function named in ``on``: those that the case does run.
4. An early exit, a block of its own that ends the kernel, is not taken.
5. Of what is left it takes the longer way, so a guarded atomic is done. By how much the ways differ is added
   to ``Walk.doubt``: nothing says that this is the branch taken. Where only ways of functions in ``off`` are
   left, the doubt is without bound.

A loop counts its longest way round times ``trips[function]`` (the innermost function named there), once where
no trips are given; such loops are counted in ``Walk.loops_once``. A predicated instruction takes its issue
slot whether or not its predicate holds, so it counts. Padding (``NOP``, ``s_nop``, ``s_code_end``) does not.
"""

import ast
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cache


@dataclass
class Block:
    opcodes: list[str] = field(default_factory=list)
    functions: list[frozenset[str]] = field(default_factory=list)  # per instruction: its inlining chain
    successors: list[int] = field(default_factory=list)
    has_call: bool = False


@dataclass
class Walk:
    opcodes: Counter  # on the path taken, loops with their trips
    listed: Counter  # in the whole listing, paths not taken included
    loops_once: int  # loops on the path whose trips nobody gave
    doubt: float  # instructions by which the ways differ at branches that no rule decides

    def count(self, pattern: str) -> int:
        return sum(n for op, n in self.opcodes.items() if re.match(pattern, op))

    @property
    def instructions(self) -> int:
        return sum(self.opcodes.values())


@cache
def _functions_of(path: str) -> list[tuple[int, int, str]]:
    try:
        with open(path) as f:
            tree = ast.parse(f.read())
    except (OSError, SyntaxError):
        return []
    defs = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
    return sorted((n.lineno, n.end_lineno or n.lineno, n.name) for n in defs)


@cache
def _function_at(path: str, line: int) -> str:
    """The innermost function that holds the line."""
    inside = [d for d in _functions_of(path) if d[0] <= line <= d[1]]
    return max(inside)[2] if inside else "?"


def _blocks(items, is_padding) -> list[Block]:
    """items: ("label", name) or ("op", name, chain, targets, falls_through, is_call)."""
    blocks, labels, jumps, fresh = [Block()], {}, [], True
    falls = [False]
    for item in items:
        if item[0] == "label":
            if not fresh:
                blocks.append(Block())
                falls.append(True)
                fresh = True
            labels[item[1]] = len(blocks) - 1
            continue
        _, op, chain, targets, falls_through, is_call = item
        block = blocks[-1]
        fresh = False
        if not is_padding(op):
            block.opcodes.append(op)
            block.functions.append(chain)
        block.has_call |= is_call
        if targets or not falls_through:
            jumps.append((len(blocks) - 1, targets))
            blocks.append(Block())
            falls.append(falls_through)
            fresh = True
    for i in range(1, len(blocks)):
        if falls[i]:
            blocks[i - 1].successors.append(i)
    for i, targets in jumps:
        blocks[i].successors += [
            labels[t] for t in targets if t in labels and labels[t] not in blocks[i].successors
        ]
    return blocks


def sass_blocks(listing: str) -> list[Block]:
    """Basic blocks of an ``nvdisasm -c -gi`` listing of one kernel."""

    def items():
        chain, opened, fresh_chain = frozenset(), {}, True
        for line in listing.splitlines():
            if m := re.match(r'\s*//## File "([^"]*)", line (\d+)(.*)', line):
                names = {_function_at(m[1], int(m[2]))}
                names |= {
                    _function_at(p, int(n)) for p, n in re.findall(r'inlined at "([^"]*)", line (\d+)', m[3])
                }
                chain = frozenset(names) if fresh_chain else chain | names
                fresh_chain = False
            elif m := re.match(r"(\.L_\w+):", line):
                yield "label", m[1]
            elif m := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(@\S+ )?\s*([A-Z][A-Z0-9_.]*)(.*);", line):
                fresh_chain = True
                predicate, op, rest = m[1], m[2], m[3]
                base = op.split(".")[0]
                target = re.findall(r"`\(([^)]*)\)", rest)
                if base == "BSSY":
                    opened[rest.split(",")[0].strip()] = target[0]
                    yield "op", op, chain, [], True, False
                elif base == "BSYNC":
                    yield "op", op, chain, [opened.get(rest.strip(), "")], False, False
                elif op.startswith("BRA.DIV"):
                    yield "op", op, chain, [], True, False
                elif base in ("BRA", "JMP"):
                    always = predicate is None and not re.match(r"\s*!?U?P\d", rest)
                    yield "op", op, chain, target, not always, False
                elif base in ("EXIT", "RET"):
                    yield "op", op, chain, [], predicate is not None, False
                else:
                    yield "op", op, chain, [], True, base == "CALL"

    return _blocks(items(), lambda op: op == "NOP")


def amdgcn_blocks(listing: str) -> list[Block]:
    """Basic blocks of the assembly text of one AMD kernel."""

    def items():
        chain, started = frozenset(), False
        files = re.findall(r'\.file\s+\d+\s+"([^"]*)"\s+"([^"]*)"', listing)
        paths = {name: f"{folder}/{name}" for folder, name in files}
        for line in listing.splitlines():
            if m := re.match(r"\s+\.loc\s.*?;\s*(\S.*)", line):
                frames = re.findall(r"([^\s\[]+?):(\d+):\d+", m[1])
                chain = frozenset(_function_at(paths.get(p, p), int(n)) for p, n in frames)
            elif m := re.match(r"(\.LBB\w+):", line):
                yield "label", m[1]
            elif m := re.match(
                r"\s+([sv]_\w+|ds_\w+|global_\w+|flat_\w+|buffer_\w+|scratch_\w+)\b\s*([^;]*)", line
            ):
                started = True
                op, rest = m[1], m[2]
                if op.startswith("s_cbranch"):
                    yield "op", op, chain, [rest.strip()], True, False
                elif op == "s_branch":
                    yield "op", op, chain, [rest.strip()], False, False
                elif op in ("s_endpgm", "s_setpc_b64"):
                    yield "op", op, chain, [], False, False
                else:
                    yield "op", op, chain, [], True, op == "s_swappc_b64"
            elif started and re.match(r"\s*\.section", line):
                return

    return _blocks(items(), lambda op: op in ("s_nop", "s_code_end"))


def _holds(block: Block, names: frozenset[str]) -> bool:
    return any(chain & names for chain in block.functions)


def _components(nodes: set[int], edges) -> list[set[int]]:
    """Strongly connected components, in reverse topological order (Tarjan)."""
    index, low, on_stack, stack, out = {}, {}, set(), [], []

    def visit(v):
        index[v] = low[v] = len(index)
        stack.append(v)
        on_stack.add(v)
        for w in edges(v):
            if w not in nodes:
                continue
            if w not in index:
                visit(w)
                low[v] = min(low[v], low[w])
            elif w in on_stack:
                low[v] = min(low[v], index[w])
        if low[v] == index[v]:
            component = set()
            while v not in component:
                w = stack.pop()
                on_stack.discard(w)
                component.add(w)
            out.append(component)

    for v in sorted(nodes):
        if v not in index:
            visit(v)
    return out


def walk(blocks: list[Block], off=(), trips=None, on=()) -> Walk:
    """The path of the case that ``off``, ``on`` and ``trips`` describe (see the module's text)."""
    off, on, trips = frozenset(off), frozenset(on), trips or {}
    barred = {i for i, b in enumerate(blocks) if b.has_call or _holds(b, off)} - {0}
    sources = Counter(w for b in blocks for w in b.successors)
    early = {i for i, b in enumerate(blocks) if not b.successors and sources[i] == 1}
    loops_once = 0

    def longest(nodes: set[int], start: int, edges) -> tuple[Counter, float]:
        """Instructions and doubt of the longest way from start that stays inside nodes; loops are folded."""
        nonlocal loops_once
        components = _components(nodes, edges)
        home = {v: n for n, c in enumerate(components) for v in c}
        best: dict[int, tuple[Counter, float]] = {}
        for n, c in enumerate(components):  # successors first
            outs = {home[w] for v in c for w in edges(v) if w in nodes and home[w] != n}
            ways = [best[o] for o in outs if not components[o] <= early] or [best[o] for o in outs]
            after, doubt = max(ways, key=lambda way: way[0].total(), default=(Counter(), 0))
            if ways:
                doubt += after.total() - min(way[0].total() for way in ways)
            cyclic = len(c) > 1 or any(v in edges(v) for v in c)
            if not cyclic:
                (only,) = c
                cost = Counter(blocks[only].opcodes)
                doubt += math.inf if only in lost else 0
            else:
                entries = {w for v in nodes - c for w in edges(v) if w in c} | ({start} & c)
                head = min(entries or c)
                once, inside = longest(c, head, lambda v, head=head: [w for w in edges(v) if w != head])
                names = Counter(f for v in c for chain in blocks[v].functions for f in chain if f in trips)
                times = trips[min(names, key=lambda f: (names[f], f))] if names else 1
                loops_once += not names
                cost = Counter({op: k * times for op, k in once.items()})
                doubt += inside * times if times else 0
            best[n] = cost + after, doubt
        return best[home[start]]

    reached, todo, lost = set(), [0], set()
    edges = {}
    while todo:
        v = todo.pop()
        if v in reached:
            continue
        reached.add(v)
        allowed = [w for w in blocks[v].successors if w not in barred]
        known = [w for w in allowed if _holds(blocks[w], on)]
        edges[v] = known or allowed or blocks[v].successors[:1]
        if not allowed and any(not blocks[w].has_call for w in blocks[v].successors):
            lost.add(v)
        todo += edges[v]
    taken, doubt = longest(reached, 0, lambda v: edges[v])
    return Walk(taken, Counter(op for b in blocks for op in b.opcodes), loops_once, doubt)
