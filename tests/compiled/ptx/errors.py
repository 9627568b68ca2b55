"""What stops a run."""


class Fault(Exception):
    """The program did what no program may do."""


class UnknownInstruction(Exception):
    """An instruction that is not modelled; the message holds its text."""
