"""The one error type that commands turn into a single line and an exit code, and how messages count."""

from __future__ import annotations


class EvenkvError(Exception):
    """A fault that the user can mend: says what is wrong and what to do.

    Parameters
    ----------
    problem : str
        The thing at fault, what was wanted and what came, in one sentence.
    remedy : str
        What to do about it, in one sentence.
    exit_code : int
        2 for wrong use or a missing dependency, 1 for a check that failed.
    """

    def __init__(self, problem: str, remedy: str = "", exit_code: int = 2) -> None:
        self.problem = problem
        self.remedy = remedy
        self.exit_code = exit_code
        super().__init__(f"{problem} {remedy}".strip())


def count_of(number: int, what: str) -> str:
    """`1 case`, `2 cases`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
