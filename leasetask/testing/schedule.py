"""What is to go wrong in one run of a task, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from leasetask.errors import ConfigurationError

FaultKind = Literal["crash", "zombie", "wake", "cut", "cancel", "double", "silence"]

ALL_FAULTS: tuple[FaultKind, ...] = ("crash", "zombie", "cut", "cancel", "double", "silence")
"""What is tried by default; `wake` only follows a `zombie`."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault at one point.

    Attributes:
        kind: `crash`: the process dies.
            `zombie`: it freezes, loses its lease, and goes on once others have ended the task.
            `wake`: the frozen ones go on at this point of the one that took over.
            `cut`: the connection is lost after a commit, before its answer; the worker lives on
            and commits again.
            `cancel`: somebody asks the task to stop.
            `double`: the task is enqueued, and its signals sent, once more.
            `silence`: no signal ever comes; the point does not matter.
        point: the point's place, from 0: in the worker's run, or after the fault before.
    """

    kind: FaultKind
    point: int = 0

    def __str__(self) -> str:
        return f"{self.kind}@{self.point}"


Schedule = tuple[Fault, ...]


def parse(text: str) -> Schedule:
    """Read a schedule as a report names it: "crash@7", or "zombie@7 wake@0".

    Raises:
        ConfigurationError: it is none.
    """
    return tuple(_fault(word) for word in text.split())


def _fault(word: str) -> Fault:
    kind, _, point = word.partition("@")
    if kind not in get_args(FaultKind) or not (point or "0").isdecimal():
        known = ", ".join(get_args(FaultKind))
        raise ConfigurationError(f"{word!r} is no fault; write KIND@POINT, KIND one of {known}")
    return Fault(kind, int(point or 0))  # type: ignore[arg-type]  # looked at just now


def in_words(schedule: Schedule) -> str:
    """Write what `parse` reads."""
    return " ".join(map(str, schedule))
