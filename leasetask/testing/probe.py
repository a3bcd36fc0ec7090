"""Sees each point that a worker comes to, and lets a schedule's faults meet it there."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import psycopg

from leasetask.committer import Committer
from leasetask.journal import COMPENSATED, REGISTERED
from leasetask.model import Ack, Checkpoint, Note
from leasetask.run import Compensation, Run
from leasetask.testing.loop import Loop, Switch
from leasetask.testing.schedule import Fault, Schedule

RECONCILE = " (reconcile)"
"""What the engine adds to an effect's name when it tells of its `reconcile`."""

_GRACE = 0.3
"""Real seconds that a worker stands still while a woken one goes on; that one may wait for it."""

Verb = Literal["step", "effect", "transaction", "wait_for", "compensation"]


class Point(NamedTuple):
    """A place in a run at which a process may die.

    Attributes:
        when: before, after or at; `in`: a body has begun.
        part: body, reconcile, compensation, checkpoint, start, registration, transaction, end, wait.
        step: the name of the step, or what ends.
    """

    when: str
    part: str
    step: str

    def __str__(self) -> str:
        return f"{self.when} {_PARTS[self.part].format(self.step)}"


_PARTS = {
    "body": "the body of {!r}",
    "reconcile": "the reconcile of {!r}",
    "compensation": "the compensation {!r}",
    "checkpoint": "the checkpoint of {!r}",
    "undone": "the checkpoint of compensation {!r}",
    "registration": "the registration of compensation {!r}",
    "start": "the start of {!r} was committed",
    "transaction": "the commit of transaction {!r}",
    "end": "{} was committed",
    "wait": "the wait {!r}",
}

_BODIES = ("body", "reconcile", "compensation")


def body_point(what: str, name: str) -> Point:
    """Read what the engine tells of a body, a business transaction or a wait."""
    when = what.partition(" ")[0]
    if what.endswith("the commit of"):
        return Point(when, "transaction", name)
    if what == "at the wait":
        return Point(when, "wait", name)
    if name.endswith(RECONCILE):
        return Point(when, "reconcile", name.removesuffix(RECONCILE))
    if name.startswith(COMPENSATED):
        return Point(when, "compensation", name.removeprefix(COMPENSATED))
    return Point(when, "body", name)


def commit_point(when: str, request: Checkpoint | Note) -> Point:
    """Name the commit of a checkpoint or an effect's start."""
    if isinstance(request, Note):
        return Point(when, "start", ", ".join(request.notes))
    name = ", ".join(request.records)
    if name.startswith(REGISTERED):
        return Point(when, "registration", name.removeprefix(REGISTERED))
    if name.startswith(COMPENSATED):
        return Point(when, "undone", name.removeprefix(COMPENSATED))
    return Point(when, "checkpoint", name)


class Event(NamedTuple):
    """A worker came to a point."""

    worker: str
    point: Point


class Hit(NamedTuple):
    """A fault met a worker at this place among its points."""

    fault: Fault
    worker: str
    place: int


@dataclass(slots=True)
class Log:
    """What happened in one run of a schedule, in its order, for the report.

    Attributes:
        bodies: how often each body began.
        verbs: by which verb each step was made.
        late_bound: compensations that saw another value of a variable than at their registration.
    """

    events: list[Event] = field(default_factory=list)
    hits: list[Hit] = field(default_factory=list)
    bodies: Counter[Point] = field(default_factory=Counter)
    verbs: dict[str, Verb] = field(default_factory=dict)
    late_bound: dict[str, str] = field(default_factory=dict)
    swallowed_cancel: bool = False


class Script:
    """A schedule as it is played: which fault comes next, and after how many points.

    Args:
        meddle: does what the world does: cancel, double, wake. Returns what the worker waits for.
    """

    def __init__(
        self, schedule: Schedule, meddle: Callable[[Fault], Iterable[Future[Any]]]
    ) -> None:
        self.log = Log()
        self.meddle = meddle
        self._left = deque(fault for fault in schedule if fault.kind != "silence")
        self._count = 0

    @property
    def next(self) -> Fault | None:
        """The fault that has not come yet."""
        return self._left[0] if self._left else None

    def come_to(self, probe: Probe) -> Fault | None:
        """Return the fault that meets a worker at the point it has come to."""
        if not self._left or self._left[0].point != self._count:
            self._count += 1
            return None
        self._count = 0
        fault = self._left.popleft()
        self.log.hits.append(Hit(fault, probe.name, len(probe.points) - 1))
        return fault

    def drop(self) -> None:
        """The next fault has come, in another process."""
        self._left.popleft()
        self._count = 0

    def put_off(self, fault: Fault) -> None:
        """Let a fault come at the next point instead."""
        self._left.appendleft(Fault(fault.kind, 0))
        self.log.hits.pop()


class Probe:
    """Watches one worker."""

    def __init__(self, name: str, script: Script, switch: Switch, loop: Loop) -> None:
        self.name = name
        self.script = script
        self.points: list[Point] = []
        self.stopped_by: Fault | None = None
        self.on_stop: Callable[[], None] = lambda: None
        self._switch = switch
        self._loop = loop
        self._woken = threading.Event()
        self._parked: list[asyncio.Future[None]] = []

    def watch(self, run: Run, committer: Committer) -> Watcher:
        """Return the observer and port of one of the worker's runs."""
        return Watcher(self, run, committer)

    def come_to(self, point: Point) -> Fault | None:
        """Take down a point; returns the fault that meets the worker there."""
        self.points.append(point)
        self.script.log.events.append(Event(self.name, point))
        # One that has been frozen and is awake again has had its fault.
        return self.script.come_to(self) if self.stopped_by is None else None

    def stop(self, fault: Fault) -> None:
        """Let nothing of the worker go on."""
        self.stopped_by = fault
        self._switch.freeze()
        self.on_stop()

    def wake(self) -> None:
        """Let a frozen worker go on."""
        self._woken.set()
        self._loop.call_soon_threadsafe(self._thaw)

    def park_thread(self) -> None:
        """Stand still in a sync handler's thread until woken."""
        self._woken.wait()

    async def park(self) -> None:
        """Stand still in a coroutine until woken."""
        future = self._loop.create_future()
        self._parked.append(future)
        await future

    def _thaw(self) -> None:
        self._switch.thaw(self._loop)
        for future in self._parked:
            future.set_result(None)
        self._parked.clear()


class Watcher:
    """Observer and port of one run."""

    def __init__(self, probe: Probe, run: Run, committer: Committer) -> None:
        self._probe = probe
        self._run = run
        self._committer = committer
        self._log = probe.script.log
        self._looks = False
        self._bound: dict[str, dict[str, Any]] = {}

    # --- as the engine's observer --------------------------------------------------------------

    def block(self, what: str, name: str) -> None:
        """A sync handler's thread has come to a point."""
        point = body_point(what, name)
        fault = self._come_to(point)
        if fault is None:
            pass
        elif fault.kind in ("crash", "zombie"):
            self._probe.stop(fault)
            self._probe.park_thread()
        elif fault.kind == "cut":
            _cut(point)
        else:
            wait_for_all(list(self._probe.script.meddle(fault)), _GRACE)
        self._begin(point)

    async def wait(self, what: str, name: str) -> None:
        """A coroutine has come to a point."""
        point = body_point(what, name)
        if await self._meet(point):
            _cut(point)
        self._begin(point)

    # --- as the run's port ---------------------------------------------------------------------

    async def send(self, run: Run, request: Checkpoint | Note) -> Ack:
        """Commit, with a point before the commit and one before its answer is heard."""
        if isinstance(request, Note):
            self._log.verbs |= dict.fromkeys(request.notes, "effect")
        await self._meet(commit_point("before", request))
        ack = await self._committer.send(run, request)
        if await self._meet(commit_point("after", request)):
            ack = await self._committer.send(run, request)
        return ack

    async def snapshot(self) -> str:
        """Ask for the server's snapshot, as `wait_for` does before its check."""
        snapshot = await self._committer.snapshot()
        self._looks = True
        return snapshot

    async def end(self, outcome: Any, words: str) -> None:
        """Commit the run's end."""
        await self._meet(Point("before", "end", words))
        await self._committer.end(self._run, outcome)
        if await self._meet(Point("after", "end", words)):
            await self._committer.end(self._run, outcome)

    # --- what both share -----------------------------------------------------------------------

    async def _meet(self, point: Point) -> bool:
        """Come to a point; returns whether the connection is cut there."""
        fault = self._come_to(point)
        if fault is None:
            return False
        if fault.kind in ("crash", "zombie"):
            self._probe.stop(fault)
            await self._probe.park()
        elif fault.kind != "cut":
            others = [asyncio.wrap_future(f) for f in self._probe.script.meddle(fault)]
            if others:
                await asyncio.wait(others, timeout=_GRACE)
        return fault.kind == "cut"

    def _come_to(self, point: Point) -> Fault | None:
        if point.part == "transaction":
            self._log.verbs[point.step] = "transaction"
        return self._probe.come_to(point)

    def _begin(self, point: Point) -> None:
        """A body begins: the worker has passed the point before it."""
        if point.when != "before" or point.part not in _BODIES:
            return
        if self._looks and point.part == "body":
            self._looks = False
            self._log.verbs[point.step] = "wait_for"
        began = Point("in", point.part, point.step)
        self._log.bodies[began] += 1
        self._log.events.append(Event(self._probe.name, began))
        if point.part == "compensation":
            self._compare(point.step)

    # --- compensations that look at a loop's variable --------------------------------------------

    def registered(self, compensation: Compensation) -> None:
        """Remember what the variables of a compensation's closure hold when it is registered."""
        self._bound[compensation.name] = dict(_closure(compensation.function))

    def _compare(self, name: str) -> None:
        functions = {c.name: c.function for c in self._run.compensations}
        for variable, value in _closure(functions.get(name)):
            if self._bound[name].get(variable) is not value:
                self._log.late_bound[name] = variable


class Registered(list[Compensation]):
    """A run's compensations, which tells a watcher of each."""

    def __init__(self, tell: Callable[[Compensation], None]) -> None:
        super().__init__()
        self._tell = tell

    def append(self, compensation: Compensation) -> None:
        """Add one."""
        self._tell(compensation)
        super().append(compensation)


def _closure(function: Any) -> Sequence[tuple[str, Any]]:
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    if code is None:
        return []
    return [(n, _content(cell)) for n, cell in zip(code.co_freevars, cells, strict=True)]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _cut(point: Point) -> None:
    """Lose the connection, where the engine has one in its hands: after a transaction's commit."""
    if point.part == "transaction":
        raise psycopg.OperationalError(f"the test cut the connection {point}")
