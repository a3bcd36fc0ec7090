"""`crash_anywhere`: shows whether a handler, with its side effects, is right wherever a process dies.

The handler runs once undisturbed, to count its points: before and after each body, each commit and
its answer, each wait, the end. Then it runs once for each point with a fault there. The crashed
worker is never unwound, since a killed process runs no `finally`; the clock is moved past the lease
and another worker goes on. That is SQLite's way of testing: fail the n-th operation for n = 1, 2, …
"""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any, Literal

from leasetask.app import App
from leasetask.model import Enqueued, TaskView
from leasetask.testing import report
from leasetask.testing.engine import LEASE, Engine, Hand
from leasetask.testing.server import scratch_database

FaultKind = Literal["crash", "zombie", "cancel", "double", "silence"]
ALL_FAULTS: tuple[FaultKind, ...] = ("crash", "zombie", "cancel", "double", "silence")

_PATIENCE = 20.0
"""Real seconds that a run may take before the harness gives up on it."""

_parked: list[Any] = []
"""Crashed coroutines, kept so that nothing ever unwinds them."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault at one point.

    Attributes:
        kind: `crash` (the process dies), `zombie` (it freezes, another takes over and ends the task,
            then it goes on), `cancel`, `double` (the task is enqueued and the signals are sent
            again), `silence` (no signal ever comes; the point does not matter).
        point: the point's place in the worker's run, from 0.
    """

    kind: FaultKind
    point: int = 0

    def __str__(self) -> str:
        return f"{self.kind}@{self.point}"

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read what `str` wrote."""
        kind, _, point = text.partition("@")
        return cls(kind, int(point or 0))  # type: ignore[arg-type]  # a wrong kind fails at its use


Schedule = tuple[Fault, ...]


@dataclass(slots=True)
class Played:
    """What happened in one run of a schedule.

    Attributes:
        points: for each worker, the points it came to.
        bodies: how often each step's body ran.
        failure: what is wrong, None if nothing.
    """

    schedule: Schedule
    outcome: TaskView
    points: list[list[str]] = field(default_factory=list)
    bodies: Counter[str] = field(default_factory=Counter)
    swallowed_cancel: bool = False
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Survived:
    """A handler that passed: how many points it has and how many schedules were run."""

    points: int
    schedules: int


class DoesNotSurvive(AssertionError):
    """The smallest schedule found under which the check fails, told in words.

    Attributes:
        schedule: replays it: `crash_anywhere(…, only=schedule)`.
    """

    def __init__(self, message: str, schedule: str) -> None:
        super().__init__(message)
        self.schedule = schedule


@dataclass(frozen=True, slots=True)
class Scenario:
    """A task and its world; plays schedules of faults on an engine.

    Attributes:
        world: makes the outside anew for each run, without arguments or with the scratch DSN.
        check: called with the world and the task's view at the end; raises or returns False when
            something is wrong.
        signals: what the outside sends, by topic.
    """

    task: Callable[..., Any] | str
    input: Any
    world: Callable[..., Any] | None
    check: Callable[[Any, TaskView], Any]
    signals: Mapping[str, Any]

    def play(self, engine: Engine, schedule: Schedule) -> Played:
        """Run the task once under a schedule, and judge it."""
        engine.reset()
        world = _make(self.world, engine.dsn)
        enqueued = engine.enqueue(self.task, self.input, key="crash-anywhere")
        if all(fault.kind != "silence" for fault in schedule):
            self.send_signals(engine)
        stage = _Stage(self, engine, enqueued)
        stage.act([fault for fault in schedule if fault.kind != "silence"])
        played = Played(
            schedule,
            engine.get(enqueued.id),
            [probe.points for probe in stage.probes],
            sum((probe.bodies for probe in stage.probes), Counter()),
            any(hand.swallowed_cancel for hand in stage.hands),
        )
        played.failure = self._judge(world, played)
        return played

    def send_signals(self, engine: Engine) -> None:
        """Let the outside send what it sends."""
        for topic, payload in self.signals.items():
            engine.signal(topic, payload)

    def _judge(self, world: Any, played: Played) -> str | None:
        outcome = played.outcome
        error = outcome.last_error or {}
        if outcome.status == "failed" and error.get("type") in report.ENGINE_ERRORS:
            return f"{error['type']}: {error['message']}"
        if played.swallowed_cancel:
            return "the handler caught TaskCanceled and returned as if nothing had happened"
        if not outcome.finished:
            if any(fault.kind == "silence" for fault in played.schedule):
                return None  # it waits for ever, as it says
            return f"the task never ended: it is {outcome.status} at {outcome.current_step!r}"
        try:
            verdict = self.check(world, outcome)
        except AssertionError as failed:
            return f"check: {failed or 'an assertion failed'}"
        return "check returned False" if verdict is False else None


def crash_anywhere(
    app: App,
    task: Callable[..., Any] | str,
    input: Any = None,
    *,
    check: Callable[[Any, TaskView], Any],
    world: Callable[..., Any] | None = None,
    signals: Mapping[str, Any] | None = None,
    faults: Sequence[FaultKind] = ALL_FAULTS,
    pairs: int | Literal["all"] = 0,
    seed: int = 0,
    only: str | None = None,
    dsn: str | None = None,
) -> Survived:
    """Run a task with a fault at every point, and check what must hold at the end.

    Args:
        app: declares the task.
        task, input: what to enqueue.
        check: `check(world, outcome)` states what must hold, by assertions; `outcome` is the task
            as `App.get` gives it, which may have succeeded, or been canceled where that is a fault.
        world: makes the outside, fake or real, anew for each run; called with the scratch
            database's DSN if it takes an argument.
        signals: topic → payload, sent as soon as the task is enqueued.
        faults: which kinds to try at each point.
        pairs: how many pairs of faults to try besides, chosen by `seed`; "all": every ordered pair
            of crashes.
        only: replay one schedule, as a report names it: "crash@7" or "crash@7 zombie@3".
        dsn: a migrated scratch database; one is made by default.

    Returns:
        How many points and schedules there were.

    Raises:
        DoesNotSurvive: names the smallest failing schedule, and what would mend it.
    """
    scenario = Scenario(task, input, world, check, signals or {})
    with scratch_database(dsn) as scratch:
        engine = Engine(app, scratch)
        try:
            return _try_all(scenario, engine, faults, pairs, seed, only)
        finally:
            engine.close()


def _try_all(
    scenario: Scenario,
    engine: Engine,
    faults: Sequence[FaultKind],
    pairs: int | Literal["all"],
    seed: int,
    only: str | None,
) -> Survived:
    if only is not None:
        _raise_if_failed(scenario, engine, tuple(Fault.parse(text) for text in only.split()))
        return Survived(0, 1)
    undisturbed = _raise_if_failed(scenario, engine, ())
    count = len(undisturbed.points[0])
    done = 1
    for schedule in _singles(faults, count, bool(scenario.signals)):
        _raise_if_failed(scenario, engine, schedule)
        done += 1
    chosen = _all_crash_pairs(scenario, engine, count) if pairs == "all" else None
    for schedule in chosen or _random_pairs(faults, count, pairs, seed):
        _raise_if_failed(scenario, engine, schedule)
        done += 1
    return Survived(count, done)


def _raise_if_failed(scenario: Scenario, engine: Engine, schedule: Schedule) -> Played:
    played = scenario.play(engine, schedule)
    if played.failure is not None:
        text = " ".join(map(str, schedule))
        raise DoesNotSurvive(report.tell(played, text), text)
    return played


def _singles(faults: Sequence[FaultKind], count: int, signals: bool) -> Iterator[Schedule]:
    for kind in faults:
        if kind == "silence":
            if signals:
                yield (Fault(kind),)
        else:
            yield from ((Fault(kind, point),) for point in range(count))


def _all_crash_pairs(scenario: Scenario, engine: Engine, count: int) -> Iterator[Schedule]:
    """Every second crash in the run that follows each first one."""
    for first in range(count):
        played = scenario.play(engine, (Fault("crash", first),))
        for second in range(len(played.points[1]) if len(played.points) > 1 else 0):
            yield (Fault("crash", first), Fault("crash", second))


def _random_pairs(
    faults: Sequence[FaultKind], count: int, pairs: int | Literal["all"], seed: int
) -> Iterator[Schedule]:
    chosen = random.Random(seed)
    kinds = [kind for kind in faults if kind != "silence"]
    for _ in range(0 if pairs == "all" else pairs):
        yield tuple(Fault(chosen.choice(kinds), chosen.randrange(count)) for _ in range(2))


def _make(world: Callable[..., Any] | None, dsn: str) -> Any:
    if world is None:
        return None
    return world(dsn) if inspect.signature(world).parameters else world()


# --- playing -----------------------------------------------------------------------------------


class _Stage:
    """Brings one worker after another on, each with the next fault, until the task has ended."""

    def __init__(self, scenario: Scenario, engine: Engine, task: Enqueued) -> None:
        self._scenario = scenario
        self._engine = engine
        self._task = task
        self.probes: list[Probe] = []
        self.hands: list[Hand] = []

    def act(self, faults: Iterable[Fault]) -> None:
        zombies: list[tuple[Probe, Future[int]]] = []
        left = list(faults)
        while True:
            fault = left.pop(0) if left else None
            probe = Probe(fault, lambda kind: self._meddle(kind))
            hand = self._engine.hand(probe)
            self.probes.append(probe)
            self.hands.append(hand)
            stopped = self._work(hand, probe)
            if stopped is None:
                break
            hand.cut_transactions()
            if fault is not None and fault.kind == "crash":
                hand.die()
            else:
                zombies.append((probe, stopped))
            self._engine.advance(LEASE + 1)
            self._engine.sweep()
        for probe, running in zombies:
            probe.release()
            try:
                running.result(_PATIENCE)
            except FutureTimeout:
                raise AssertionError("the woken worker does not end") from None
        for hand, probe in zip(self.hands, self.probes, strict=True):
            if probe.fault is None or probe.fault.kind != "crash" or not probe.stopped.is_set():
                hand.die()

    def _work(self, hand: Hand, probe: Probe) -> Future[int] | None:
        """Let a worker run all there is; None, or what it was doing when it was stopped."""
        while True:
            running = self._engine.start(hand.drain_async())
            both = threading.Event()
            running.add_done_callback(lambda _, both=both: both.set())  # type: ignore[misc]  # mypy cannot infer it
            probe.on_stop = both.set
            if not both.wait(_PATIENCE):
                raise AssertionError(f"{hand.name} hangs at {probe.points[-1:]}")
            if probe.stopped.is_set():
                return running
            running.result()
            if not self._engine.skip():
                return None

    def _meddle(self, kind: FaultKind) -> None:
        if kind == "cancel":
            self._engine.cancel(self._task.id, "as the test wills")
            for hand in self.hands:
                hand.learn_of_cancel()
        elif kind == "double":
            self._engine.enqueue(self._scenario.task, self._scenario.input, key="crash-anywhere")
            self._scenario.send_signals(self._engine)


class Probe:
    """Counts the points of one worker, and does what its fault says at one of them."""

    def __init__(self, fault: Fault | None, meddle: Callable[[FaultKind], None]) -> None:
        self.fault = fault
        self.points: list[str] = []
        self.bodies: Counter[str] = Counter()
        self.stopped = threading.Event()
        self.on_stop: Callable[[], None] = lambda: None
        self._meddle = meddle
        self._released = threading.Event()

    def release(self) -> None:
        """Let a frozen worker go on."""
        self._released.set()

    def block(self, what: str, name: str) -> None:
        """A sync handler's thread has come to a point."""
        if self._stops_at(what, name):
            self.stopped.set()
            self.on_stop()
            if self.fault is not None and self.fault.kind == "crash":
                threading.Event().wait()
            self._released.wait()

    async def wait(self, what: str, name: str) -> None:
        """A coroutine has come to a point."""
        if self._stops_at(what, name):
            self.stopped.set()
            self.on_stop()
            if self.fault is not None and self.fault.kind == "crash":
                _parked.append(asyncio.current_task())
                await asyncio.get_running_loop().create_future()
            await asyncio.to_thread(self._released.wait)

    def _stops_at(self, what: str, name: str) -> bool:
        self.points.append(f"{what} {name}")
        if what == "before the body of":
            self.bodies[name] += 1
        if self.fault is None or len(self.points) - 1 != self.fault.point:
            return False
        if self.fault.kind in ("crash", "zombie"):
            return True
        self._meddle(self.fault.kind)
        return False
