"""What stops a run."""


class Fault(Exception):  # noqa: N818  a fault of the program that runs, not of ours
    """The program did what no program may do."""


class UnknownInstruction(Exception):  # noqa: N818
    """An instruction that is not modelled; the message holds its text."""
