"""What leasetask must reach, each a ratio of two figures of the same run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.floor import BATCHED, COPY, STATE_BATCHED

OURS = "leasetask"


@dataclass(frozen=True)
class Goal:
    """One goal and what was measured."""

    text: str
    bound: float
    measured: float
    at_most: bool = False

    @property
    def reached(self) -> bool:
        """Whether it is met."""
        return self.measured <= self.bound if self.at_most else self.measured >= self.bound


class Figures:
    """A run's cases by workload and subject."""

    def __init__(self, results: dict[str, Any]) -> None:
        self._cases = {(c["workload"], c["subject"]): c for c in results["cases"] if "median" in c}

    def of(self, workload: str) -> list[dict[str, Any]]:
        """Return a workload's cases in the order of the run."""
        return [case for (name, _), case in self._cases.items() if name == workload]

    def median(self, workload: str, subject: str) -> float | None:
        """Return a case's median, if it was measured."""
        case = self._cases.get((workload, subject))
        return None if case is None else float(case["median"])

    def detail(self, workload: str, subject: str, name: str) -> float | None:
        """Return a detail of a case, if it was measured."""
        case = self._cases.get((workload, subject))
        return None if case is None else case["detail"].get(name)

    def cost(self, workload: str, subject: str, name: str) -> float | None:
        """Return a cost per unit of a case, if it was measured."""
        case = self._cases.get((workload, subject))
        return None if case is None else case["costs"].get(name)

    def best(self, workload: str, *subjects: str) -> float | None:
        """Return the highest median of these subjects."""
        found = [value for s in subjects if (value := self.median(workload, s)) is not None]
        return max(found, default=None)


def goals(figures: Figures) -> Iterator[Goal]:
    """Give the goals whose figures this run has."""
    for text, bound, ours, theirs, at_most in _pairs(figures):
        if ours is not None and theirs:
            yield Goal(text, bound, ours / theirs, at_most)


def _pairs(f: Figures) -> Iterator[tuple[str, float, float | None, float | None, bool]]:
    drain, steps = f.median("drain", OURS), f.median("steps", OURS)
    long = f.median("long task", OURS)
    durable = ("absurd", "dbos", "openworkflow")
    python = ("pgqueuer", "absurd", "dbos", "procrastinate", "oban")
    yield "drain, of pgqueuer's", 1.2, drain, f.median("drain", "pgqueuer"), False
    yield "drain, of graphile-worker's", 0.7, drain, f.median("drain", "graphile-worker"), False
    yield (
        "drain, of the best of absurd, dbos, openworkflow",
        15,
        drain,
        f.best("drain", *durable),
        False,
    )
    yield "drain, of the batched floor", 0.5, drain, f.median("floor", BATCHED), False
    yield (
        "steps, of the best of absurd, dbos, openworkflow",
        12,
        steps,
        f.best("steps", *durable),
        False,
    )
    yield "steps, of the batched floor", 0.25, steps, f.median("floor", STATE_BATCHED), False
    yield (
        "steps of one task, of the best of the three",
        1.5,
        long,
        f.best("long task", *durable),
        False,
    )
    single = f.median("enqueue one by one", OURS)
    yield (
        "enqueue one by one, of the fastest Python peer",
        1.0,
        single,
        f.best("enqueue one by one", *python),
        False,
    )
    yield (
        "enqueue many, of COPY",
        0.5,
        f.median("enqueue many", OURS),
        f.median("floor", COPY),
        False,
    )
    pick = f.median("pick-up", OURS)
    yield (
        "pick-up p50, of graphile-worker's",
        1.2,
        pick,
        f.median("pick-up", "graphile-worker"),
        True,
    )
    yield "pick-up p99, ms", 5, f.detail("pick-up", OURS, "p99"), 1, True
    yield (
        "signal wake p50, of dbos's",
        0.3,
        f.median("signal wake", OURS),
        f.median("signal wake", "dbos"),
        True,
    )
    backlog = f.of("backlog")
    for case in backlog[1:]:
        yield (
            f"rate with {case['subject']}, of an empty table's",
            0.9,
            case["median"],
            backlog[0]["median"],
            False,
        )
    snapshot = f.of("snapshot")
    if len(snapshot) == 2:
        yield (
            "rate under a held snapshot, of the rate without",
            0.8,
            snapshot[1]["median"],
            snapshot[0]["median"],
            False,
        )
    last = f.detail("long task", OURS, "last_100_to_first_100")
    yield "time of a long task's last 100 steps, of its first 100", 1.5, last, 1, True
    yield (
        "HOT share of updates in `steps`, claims and ends included",
        0.79,
        f.cost("steps", OURS, "hot_share"),
        1,
        False,
    )
    for case in f.of("business"):
        yield (
            f"business transactions, {case['subject']}, of those without notification",
            0.8,
            case["median"],
            1,
            False,
        )
    yield "idle worker, statements/s", 3, f.median("idle worker", OURS), 1, True
    yield "idle worker, CPU %", 0.5, f.detail("idle worker", OURS, "cpu_percent"), 1, True
