"""PTX text to instructions: one kernel, its registers and parameters, cut into straight runs."""

import re
from dataclasses import dataclass, field

from .errors import UnknownInstruction

SHARED = "global_smem"
"""The one shared array of a Triton kernel."""
ENDS_RUN = ("bra", "ret", "exit", "bar.sync", "barrier.sync")


@dataclass(frozen=True)
class Register:
    index: int
    kind: str  # as declared: pred, b16, b32, b64...
    name: str
    negated: bool = False


@dataclass(frozen=True)
class Number:
    bits: int  # negative ones as they are; whoever reads them cuts to the width


@dataclass(frozen=True)
class Special:
    name: str  # %tid.x and its kind


@dataclass(frozen=True)
class Name:
    """A label, a parameter or the shared array, and an offset in bytes."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Address:
    base: "Register | Name | Number"
    offset: int


@dataclass(frozen=True)
class Group:
    """{a, b, ...}"""

    items: tuple


@dataclass(frozen=True)
class Pair:
    """p|q: a result and a second one."""

    first: Register
    second: Register


DISCARD = Name("_")


@dataclass(frozen=True)
class Instruction:
    opcode: str
    operands: tuple
    guard: Register | None
    text: str
    place: str  # file:line of the Triton source

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


@dataclass
class Run:
    """Instructions that are executed one after the other; the last may branch, wait or return."""

    first: int  # index of its first instruction in the program
    instructions: list[Instruction] = field(default_factory=list)


class Program:
    """A parsed kernel.

    ptx: text with one entry function. Raises `UnknownInstruction` for a statement that cannot be read;
    whether an instruction is known is found when it is decoded.
    """

    def __init__(self, ptx: str):
        entry = re.search(r"\.entry\s+(\w+)\s*\(([^)]*)\)([^{]*)\{", ptx)
        if not entry:
            raise ValueError("ptx must hold an entry function, got none")
        self.name = entry[1]
        self.parameters = [
            (words[1].lstrip("."), words[-1])
            for words in (line.split() for line in entry[2].split(",") if line.strip())
        ]
        threads = re.search(r"\.reqntid\s+(\d+)", entry[3])
        if not threads:
            raise ValueError(f"ptx must give the block's threads as .reqntid, got {entry[3].strip()!r}")
        self.threads = int(threads[1])
        self.registers: list[Register] = []
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}  # index of the instruction that follows
        files = re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', ptx)
        self._files = {number: path.rsplit("/", 1)[-1] for number, path in files}
        self._scopes: list[dict[str, Register]] = []
        self._place = "?"
        self._read(re.sub(r"//[^\n]*", "", ptx[entry.end() :]))

    def replaced(self, index: int, text: str) -> "Program":
        """A copy whose instruction `index` is another one; an empty text leaves it out."""
        other = object.__new__(Program)
        other.__dict__ |= self.__dict__
        other.instructions = list(self.instructions)
        self._place = self.instructions[index].place
        other.instructions[index] = self._instruction(text or "nop")
        return other

    def runs(self) -> tuple[list[Run], dict[str, int]]:
        """The straight runs in the text's order, and the run that each label names."""
        starts = set(self.labels.values()) | {0}
        starts |= {i + 1 for i, instruction in enumerate(self.instructions) if _ends_run(instruction)}
        runs, of_start = [], {}
        for i, instruction in enumerate(self.instructions):
            if i in starts:
                of_start[i] = len(runs)
                runs.append(Run(i))
            runs[-1].instructions.append(instruction)
        of_start[len(self.instructions)] = len(runs)
        return runs, {name: of_start[i] for name, i in self.labels.items()}

    def _read(self, text: str) -> None:
        self._scopes.append({})
        at = 0
        token = re.compile(
            r"\s*(?:([{}])|\.(loc)\b([^\n]*)|(\.(?:pragma|section|reg)[^;]*);|([\w$]+):|([^;]+);)"
        )
        while self._scopes:
            match = token.match(text, at)
            if not match:
                raise UnknownInstruction(text[at : at + 80])
            at = match.end()
            brace, loc, location, directive, label, statement = match.groups()
            if brace == "{":
                self._scopes.append({})
            elif brace:
                self._scopes.pop()
            elif loc:
                number, line, *_ = location.split()
                if line != "0":  # 0: made by the compiler
                    self._place = f"{self._files.get(number, '?')}:{line}"
            elif directive:
                if directive.startswith(".reg"):
                    self._declare(directive)
            elif label:
                self.labels[label] = len(self.instructions)
            else:
                self.instructions.append(self._instruction(" ".join(statement.split())))
        self._scopes = [{register.name: register for register in self.registers}]

    def _declare(self, text: str) -> None:
        _, kind, *names = text.replace(",", " ").split()
        for name in names:
            many = re.fullmatch(r"(.*)<(\d+)>", name)
            for one in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]:
                register = Register(len(self.registers), kind.lstrip("."), one)
                self._scopes[-1][one] = register
                self.registers.append(register)

    def _instruction(self, text: str) -> Instruction:
        match = re.fullmatch(r"(?:@(!?%?[\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", text.rstrip("; "))
        if not match:
            raise UnknownInstruction(f"{self._place}: {text}")
        guard, opcode, rest = match.groups()
        try:
            operands = tuple(self._operand(o) for o in _split(rest))
            condition = self._operand(guard) if guard else None
        except (KeyError, ValueError) as error:
            raise UnknownInstruction(f"{self._place}: {text} ({error})") from error
        return Instruction(opcode, operands, condition, text, self._place)

    def _operand(self, text: str):
        text = text.strip()
        if text.startswith("{"):
            return Group(tuple(self._operand(item) for item in text.strip("{}").split(",")))
        if text.startswith("["):
            base, _, offset = text.strip("[] ").partition("+")
            return Address(self._operand(base), int(offset or "0", 0))
        if "|" in text:
            return Pair(*(self._operand(part) for part in text.split("|")))
        name = text.lstrip("!")
        for scope in reversed(self._scopes):
            if name in scope:
                register = scope[name]
                return Register(register.index, register.kind, name, True) if text != name else register
        if text.startswith("%"):
            return Special(text)
        if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})", text):
            return Number(int(match[1] or match[2], 16))
        if re.fullmatch(r"-?\d\w*", text):
            return Number(int(text.rstrip("U"), 0))
        match = re.fullmatch(r"([\w$]+)(?:\+(\d+))?", text)
        if not match:
            raise ValueError(f"cannot read {text!r}")
        return Name(match[1], int(match[2] or 0))


def _ends_run(instruction: Instruction) -> bool:
    return instruction.opcode in ENDS_RUN or instruction.parts[0] in ENDS_RUN


def _split(operands: str) -> list[str]:
    """At the commas outside of braces and brackets."""
    return [o for o in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]])+", operands) if o.strip()]
