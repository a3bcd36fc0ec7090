"""What the workloads share: the server, fresh databases, samples, and the size of a run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from bench.server import Server


@dataclass(frozen=True)
class Sample:
    """One repetition: its value, what each unit cost, and what else is worth showing."""

    value: float
    costs: dict[str, float] = field(default_factory=dict)
    detail: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One thing that is measured, of one subject (an engine, or a variant of the workload).

    Attributes:
        unit: of the value: "tasks/s", "ms", …
        floor: the floor's case that the value is set against, if there is one.
        times: repetitions; None: as many as the run makes.
    """

    workload: str
    subject: str
    unit: str
    run: Callable[[], Sample]
    floor: str | None = None
    times: int | None = None


class Lab:
    """A run's server and size."""

    def __init__(self, server: Server, *, quick: bool, most_rows: int = 10**7) -> None:
        self.server = server
        self.quick = quick
        self.most_rows = most_rows
        self._numbers = itertools.count(1)

    @property
    def times(self) -> int:
        """Return how often what takes long is repeated."""
        return 1 if self.quick else 3

    def size(self, full: int, quick: int) -> int:
        """Return how many units this run takes."""
        return quick if self.quick else full

    @contextmanager
    def database(self) -> Iterator[str]:
        """Give the DSN of a new database."""
        with self.server.database(f"bench_{next(self._numbers)}") as dsn:
            yield dsn


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Return once the condition holds.

    Raises:
        TimeoutError: it did not within so many seconds.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s in vain for {what}")
        time.sleep(0.002)


def percentile(values: list[float], share: float) -> float:
    """Return the value below which a share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
