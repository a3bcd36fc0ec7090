"""`crash_anywhere`: shows whether a handler, with its side effects, is right wherever a process dies.

The handler runs once undisturbed, to count its points: before and after each body, each commit and
its answer, each wait, the end. Then it runs once for each point with a fault there. The crashed
worker is never unwound, since a killed process runs no `finally`; the clock is moved past the lease
and another worker goes on. That is SQLite's way of testing: fail the n-th operation for n = 1, 2, …
"""

from __future__ import annotations

import inspect
import itertools
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from psycopg import errors as pg

from leasetask import client, protocol
from leasetask.app import App
from leasetask.connection import fetch
from leasetask.model import Enqueued, TaskView
from leasetask.testing import report
from leasetask.testing.engine import LEASE, Engine, Hand
from leasetask.testing.probe import Log, Point, Script
from leasetask.testing.process import Child, Processes
from leasetask.testing.schedule import ALL_FAULTS, Fault, FaultKind, Schedule, in_words, parse
from leasetask.testing.server import scratch_database

_PATIENCE = 15.0
"""Real seconds that a worker may take between two points before the harness gives up on it."""

_MOST_ROUNDS = 300
"""Times that the clock is moved to the next due time before a task counts as never ending."""


@dataclass(slots=True)
class Played:
    """What happened in one run of a schedule.

    Attributes:
        outcome: the task at the end.
        points: for each worker, the points it came to.
        log: the same in the order of events, and what else the report needs.
        world_then: how the world looked at the end, if it can say so.
        failure: what is wrong, None if nothing.
    """

    schedule: Schedule
    outcome: TaskView
    points: list[list[Point]]
    log: Log
    world: Any = None
    world_then: str | None = None
    failure: str | None = None
    hung: str | None = None
    endless: bool = False


@dataclass(frozen=True, slots=True)
class Survived:
    """A handler that passed.

    Attributes:
        points: how many its undisturbed run has.
        schedules: how many were run, by their kinds: `{"crash": 26, "crash crash": 480}`.
    """

    points: int
    schedules: dict[str, int] = field(default_factory=dict)

    @property
    def runs(self) -> int:
        """How many schedules were run in all."""
        return sum(self.schedules.values())


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
        task, input: what to enqueue.
        world: makes the outside anew for each run, without arguments or with the scratch DSN.
        check: called with the world and the task's view at the end; raises or returns False when
            something is wrong.
        signals: what the outside sends, by topic.
        processes: starts the workers that are to crash or freeze as processes of their own.
    """

    task: Callable[..., Any] | str
    input: Any = None
    world: Callable[..., Any] | None = None
    check: Callable[[Any, TaskView], Any] = lambda world, outcome: True
    signals: Mapping[str, Any] = field(default_factory=dict)
    processes: Processes | None = None

    def play(self, engine: Engine, schedule: Schedule = ()) -> Played:
        """Run the task once under a schedule, and judge it."""
        engine.reset()
        world = _make(self.world, engine.dsn)
        if self.processes is not None and self.processes.served is not None:
            self.processes.served.world = world
        enqueued = engine.enqueue(self.task, self.input, key="crash-anywhere")
        if all(fault.kind != "silence" for fault in schedule):
            self.send_signals(engine)
        stage = _Stage(self, engine, enqueued, schedule)
        stage.act()
        played = stage.played(world)
        played.failure = self._judge(played)
        played.world_then = _in_words(world)
        return played

    def assert_survives(self, engine: Engine, schedule: Schedule = ()) -> Played:
        """As `play`; for schedules that Hypothesis draws.

        Raises:
            DoesNotSurvive: with the report.
        """
        played = self.play(engine, schedule)
        if played.failure is not None:
            undisturbed = self.play(engine) if schedule else played
            raise _refusal(played, undisturbed)
        return played

    def send_signals(self, engine: Engine) -> None:
        """Let the outside send what it sends; a worker delivers it."""
        for topic, payload in self.signals.items():
            call = client.signal(topic, payload, False, engine.app.payload_limit, False)
            client.run(call, lambda query: fetch(engine.db, query))

    def _judge(self, played: Played) -> str | None:
        outcome = played.outcome
        error = outcome.last_error or {}
        if outcome.status == "failed" and error.get("type") in report.ENGINE_ERRORS:
            return f"{error['type']}: {error['message']}"
        if played.log.swallowed_cancel:
            return "the handler was told of the cancel and returned as if nothing had happened"
        if played.hung is not None:
            return played.hung
        if not outcome.finished:
            silent = any(fault.kind == "silence" for fault in played.schedule)
            return None if silent else _stands(played)  # without a signal it waits, as it says
        try:
            verdict = self.check(played.world, outcome)
        except AssertionError as failed:
            return f"check: {report.assertion(failed)}"
        except Exception as raised:
            return f"check raised {type(raised).__name__}: {raised}"
        return "check returned False" if verdict is False else None


def _stands(played: Played) -> str:
    outcome = played.outcome
    again = f", and still wakes after {_MOST_ROUNDS} rounds" if played.endless else ""
    return f"the task never ended: it is {outcome.status} at {outcome.current_step!r}{again}"


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
    mode: Literal["parked", "process"] = "parked",
    world_at: str | None = None,
) -> Survived:
    """Run a task with a fault at every point, and check what must hold at the end.

    A zombie is tried twice at each point: it wakes after the task has ended, and while the one that
    took over works. Where a cancel leads to compensations, these are crashed at every point too.
    Meanwhile `app.dsn` is the scratch database's. A factory given as `App(transactions=…)` is used
    as it is: let `world` point it there, without a limit on its connections, since those of crashed
    workers never come back.

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
        mode: "parked": a crashed worker stands still for ever, in this process. "process": the
            workers that are to crash or freeze are processes, which really get SIGKILL and SIGSTOP;
            some half a second each, so rather for `faults=["crash"]`. They import the App by the
            name of its module, where the task too has to be declared. The other workers, and all
            those of other faults, are in this process.
        world_at: with "process", the `module:attribute` by which handlers reach the world. It
            stays in this process; there a proxy stands for it, whose calls and attributes travel
            pickled. Not needed for a world in the database or in files.

    Returns:
        How many points and schedules there were.

    Raises:
        DoesNotSurvive: names the smallest failing schedule, and what would mend it.
        ConfigurationError: `only` names no schedule; or another process cannot import the App.
    """
    with ExitStack() as stack:
        processes = Processes(app, task, world_at) if mode == "process" else None
        if processes is not None:
            stack.callback(processes.close)
        scenario = Scenario(task, input, world, check, signals or {}, processes)
        engine = stack.enter_context(Engine(app, stack.enter_context(scratch_database(dsn))))
        if only is not None:
            scenario.assert_survives(engine, parse(only))
            return Survived(0, {"only": 1})
        return _Search(scenario, engine).run(faults, pairs, seed)


def _refusal(
    played: Played, undisturbed: Played, innocent: frozenset[Point] = frozenset()
) -> DoesNotSurvive:
    text = in_words(played.schedule)
    return DoesNotSurvive(report.tell(played, undisturbed, text, innocent), text)


def _in_words(world: Any) -> str | None:
    words = repr(world)
    plain = world is None or isinstance(world, str) or words == object.__repr__(world)
    return None if plain else f"{words:.500}"


def _make(world: Callable[..., Any] | None, dsn: str) -> Any:
    if world is None:
        return None
    return world(dsn) if inspect.signature(world).parameters else world()


# --- searching ---------------------------------------------------------------------------------


class _Search:
    """Tries schedules from the smallest on, and stops at the first that fails."""

    def __init__(self, scenario: Scenario, engine: Engine) -> None:
        self._scenario = scenario
        self._engine = engine
        self._done: dict[str, int] = {}
        self._after_crash: dict[int, int] = {}
        self._innocent: frozenset[Point] = frozenset()
        self._undisturbed = self._play(())

    def run(self, faults: Sequence[FaultKind], pairs: int | Literal["all"], seed: int) -> Survived:
        """Try all that was asked for.

        Raises:
            DoesNotSurvive: at the first failure.
        """
        points = self._undisturbed.points[0] if self._undisturbed.points else []
        self._refuse_if_failed(self._undisturbed)
        for kind in faults:
            singles = [(Fault(kind, point),) for point in self._places(kind, points)]
            if kind == "cancel" and "crash" in faults:
                self._try_each(_crashes_while_compensating([self._try(s) for s in singles]))
                continue
            self._try_each(singles)
            if kind == "zombie":
                self._try_each([(Fault(kind, p), Fault("wake")) for p in range(len(points))])
        if pairs == "all":
            self._try_each(self._crash_pairs(points))
        else:
            self._try_each(_random_pairs(faults, len(points), pairs, seed))
        return Survived(len(points), self._done)

    def _try_each(self, schedules: Iterable[Schedule]) -> None:
        for schedule in schedules:
            self._try(schedule)

    def _try(self, schedule: Schedule) -> Played:
        played = self._play(schedule)
        if played.failure is None:
            self._innocent |= report.doubled(played, self._undisturbed)
            return played
        self._refuse_if_failed(self._simplest(played))
        return played

    def _play(self, schedule: Schedule) -> Played:
        name = " ".join(fault.kind for fault in schedule) or "undisturbed"
        self._done[name] = self._done.get(name, 0) + 1
        played = self._scenario.play(self._engine, schedule)
        if name == "crash":
            self._after_crash[schedule[0].point] = sum(map(len, played.points[1:2]))
        return played

    def _refuse_if_failed(self, played: Played) -> None:
        if played.failure is not None:
            raise _refusal(played, self._undisturbed, self._innocent)

    def _simplest(self, failed: Played) -> Played:
        """Look at the later points too, where several branches were cut off at once.

        Of bodies that ran twice, the one is to blame that does harm when it runs twice alone, and
        none that ran twice elsewhere without harm.
        """
        best, fewest = failed, len(report.repeated(failed, self._undisturbed))
        if fewest < 2 or len(failed.schedule) != 1:
            return failed
        for point in range(failed.schedule[0].point + 1, len(self._undisturbed.points[0])):
            played = self._play((Fault(failed.schedule[0].kind, point),))
            count = len(report.repeated(played, self._undisturbed))
            if played.failure is None:
                self._innocent |= report.doubled(played, self._undisturbed)
            elif count < fewest:
                best, fewest = played, count
        return best

    def _places(self, kind: FaultKind, points: list[Point]) -> Iterable[int]:
        if kind == "silence":
            return [0] if self._scenario.signals else []
        if kind == "cut":
            return [i for i, point in enumerate(points) if _is_answer(point)]
        return range(len(points))

    def _crash_pairs(self, points: list[Point]) -> Iterator[Schedule]:
        """Every second crash in the run that follows each first one."""
        for first in range(len(points)):
            if first not in self._after_crash:
                self._try((Fault("crash", first),))
            for second in range(self._after_crash[first]):
                yield (Fault("crash", first), Fault("crash", second))


def _crashes_while_compensating(canceled: Sequence[Played]) -> Iterator[Schedule]:
    """Crash the compensations of the cancel which sets the most of them going."""
    best: tuple[int, int, range] = (0, 0, range(0))
    for played in canceled:
        point = played.schedule[0].point
        follows = played.points[0][point + 1 :]
        undoes = [n for n, p in enumerate(follows) if p.part == "compensation"]
        if len(undoes) > best[0]:
            best = (len(undoes), point, range(undoes[0], len(follows)))
    yield from ((Fault("cancel", best[1]), Fault("crash", n)) for n in best[2])


def _is_answer(point: Point) -> bool:
    return point.when == "after" and point.part in _COMMITS


_COMMITS = ("checkpoint", "undone", "registration", "start", "transaction", "end")


def _random_pairs(
    faults: Sequence[FaultKind], count: int, pairs: int, seed: int
) -> Iterator[Schedule]:
    chosen = random.Random(seed)
    kinds: list[FaultKind] = [kind for kind in faults if kind != "silence"]
    for _ in range(pairs if kinds and count else 0):
        first = Fault(chosen.choice(kinds), chosen.randrange(count))
        follows: list[FaultKind] = [*kinds, "wake"] if first.kind == "zombie" else kinds
        yield (first, Fault(chosen.choice(follows), chosen.randrange(count)))


# --- playing -----------------------------------------------------------------------------------


class _Hangs(Exception):
    """A worker does not come to another point."""


@dataclass(frozen=True, slots=True)
class _Frozen:
    """A worker that stands still; `wake` gives what it is doing then."""

    name: str
    wake: Callable[[], Future[Any]]


def _awake(hand: Hand, running: Future[int]) -> Callable[[], Future[int]]:
    def wake() -> Future[int]:
        assert hand.probe is not None
        hand.probe.wake()
        return running

    return wake


def _in_a_thread(function: Callable[..., Any], *args: Any) -> Future[Any]:
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


class _Stage:
    """Brings one worker after another on, until all has ended that they and the faults set going."""

    def __init__(
        self, scenario: Scenario, engine: Engine, task: Enqueued, schedule: Schedule
    ) -> None:
        self._scenario = scenario
        self._engine = engine
        self._task = task
        self._schedule = schedule
        self._script = Script(schedule, self._meddle)
        self._workers: list[Hand | Child] = []
        self._frozen: list[_Frozen] = []
        self._woken: list[tuple[str, Future[Any]]] = []
        self._names = ("ABCDEFGHIJKLMNOPQRSTUVWXYZ"[n % 26] for n in itertools.count())
        self._since = engine.server_time()
        self._hung: str | None = None
        self._rounds = 0

    def act(self) -> None:
        """Play it to the end."""
        try:
            while self._act_once() or self._wake_the_frozen():
                pass
        except _Hangs as hang:
            self._hung = str(hang)
        for worker in self._workers:
            if isinstance(worker, Child):
                worker.end()
            elif not worker.switch.frozen and self._hung is None:
                self._engine.call(worker.retire())

    def played(self, world: Any) -> Played:
        """Tell what happened."""
        return Played(
            self._schedule,
            self._engine.get(self._task.id),
            [worker.points for worker in self._workers],
            self._script.log,
            world,
            hung=self._hung,
            endless=self._rounds >= _MOST_ROUNDS,
        )

    def _act_once(self) -> bool:
        """Let a new worker run all there is; returns whether another has to go on."""
        fault = self._script.next
        processes = self._scenario.processes
        if processes is not None and fault is not None and fault.kind in ("crash", "zombie"):
            stopped = self._act_in_a_process(processes, fault)
        else:
            stopped = self._act_here()
        if not stopped:
            return False
        self._engine.advance(LEASE + 1)
        self._engine.sweep()
        return True

    def _act_here(self) -> bool:
        hand = self._engine.hand(f"worker {next(self._names)}", self._script)
        self._workers.append(hand)
        running = self._work(hand)
        if running is None:
            return False
        assert hand.probe is not None and hand.probe.stopped_by is not None
        follows = self._script.next
        if hand.probe.stopped_by.kind == "crash":
            hand.bury()
            self._engine.cut_sessions(self._since)
        else:
            self._frozen.append(_Frozen(hand.name, _awake(hand, running)))
        if follows is None or follows.kind != "wake":
            hand.cut_transactions()
        return True

    def _act_in_a_process(self, processes: Processes, fault: Fault) -> bool:
        name = f"worker {next(self._names)}"
        child = processes.start(self._engine.dsn, name, fault, self._script.log)
        self._workers.append(child)
        self._wait_for(child)
        if child.stopped_by is None:
            return False
        self._script.drop()
        follows = self._script.next
        if fault.kind == "zombie":
            self._frozen.append(_Frozen(name, lambda: _in_a_thread(self._wake_child, child)))
        if follows is None or follows.kind != "wake":
            self._engine.cut_sessions(self._since)
        return True

    def _wait_for(self, child: Child) -> None:
        trouble = child.wait()
        if trouble is not None:
            raise _Hangs(trouble)

    def _wake_child(self, child: Child) -> None:
        child.wake()
        self._wait_for(child)

    def _wake_the_frozen(self) -> bool:
        """Let the zombies go on; returns whether there were any, who may have set more going."""
        self._wake()
        woken, self._woken = self._woken, []
        for name, running in woken:
            try:
                running.result(_PATIENCE)
            except FutureTimeout:
                raise _Hangs(f"{name}, awake again, does not end") from None
        return bool(woken)

    def _wake(self) -> list[Future[Any]]:
        frozen, self._frozen = self._frozen, []
        woken = [(worker.name, worker.wake()) for worker in frozen]
        self._woken += woken
        return [running for _, running in woken]

    def _work(self, hand: Hand) -> Future[int] | None:
        """Let a worker run all there is; None, or what it was doing when it was stopped."""
        assert hand.probe is not None
        while True:
            over = threading.Event()
            hand.probe.on_stop = over.set
            running = self._engine.start(hand.drain())
            running.add_done_callback(lambda _, over=over: over.set())  # type: ignore[misc]  # mypy cannot infer it
            self._await(hand, over)
            if hand.probe.stopped_by is not None:
                return running
            running.result()
            self._rounds += 1
            if self._rounds >= _MOST_ROUNDS or not self._engine.skip():
                return None

    def _await(self, hand: Hand, over: threading.Event) -> None:
        """Wait for as long as the worker comes to further points."""
        assert hand.probe is not None
        seen = -1
        while not over.wait(_PATIENCE):
            if len(hand.probe.points) == seen:
                where = report.where(hand.probe.points, seen - 1)
                raise _Hangs(f"{hand.name} hangs: {_PATIENCE:.0f} s ago it was {where}")
            seen = len(hand.probe.points)

    def _meddle(self, fault: Fault) -> Iterable[Future[Any]]:
        if fault.kind == "wake":
            if not self._frozen:
                self._script.log.hits.pop()
            return self._wake()  # they are waited for once more at the end
        db = self._engine.db
        try:
            with db.transaction():
                db.execute("set local lock_timeout = '20ms'")
                self._cancel() if fault.kind == "cancel" else self._double()
        except pg.LockNotAvailable:
            # The worker stands in its own transaction: whoever comes would wait for its commit.
            self._script.put_off(fault)
        return []

    def _cancel(self) -> None:
        fetch(self._engine.db, protocol.cancel(self._task.id, "as the test wills"))
        for worker in self._workers:
            if isinstance(worker, Hand):
                worker.learn_of_cancel(self._task.id)

    def _double(self) -> None:
        self._engine.enqueue(self._scenario.task, self._scenario.input, key="crash-anywhere")
        self._scenario.send_signals(self._engine)
