"""Hypothesis: schedules of faults as a strategy, and a state machine for tasks and signals together."""

from __future__ import annotations

import atexit
import functools
import threading
from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from leasetask.app import App
from leasetask.testing.engine import LEASE, Engine
from leasetask.testing.probe import Script
from leasetask.testing.schedule import ALL_FAULTS, Fault, FaultKind, Schedule
from leasetask.testing.server import scratch_database


def schedules(
    *, faults: Sequence[FaultKind] = (*ALL_FAULTS, "wake"), most: int = 3, points: int = 100
) -> st.SearchStrategy[Schedule]:
    """Schedules for `Scenario.play`: so many faults at the most, shrinking to the fewest and earliest.

    Args:
        faults: which kinds.
        most: faults in one schedule; each counts its point from the one before.
        points: the last point that may be hit; points that a run does not come to hit nothing.
    """
    one = st.builds(Fault, st.sampled_from(list(faults)), st.integers(0, points))
    return st.lists(one, max_size=most).map(tuple)


class EngineMachine(RuleBasedStateMachine):
    """A base for properties that span several tasks and signals.

    Set `app`, add rules that enqueue, signal and cancel through `self.engine`, and invariants;
    override `begin` to make the world anew. The rules here let workers work, die half-way, and time
    pass. All examples share one scratch database, emptied before each.
    """

    app: App

    def __init__(self) -> None:
        super().__init__()
        self.engine = _engine_of(self.app)
        self.engine.reset()
        self._workers = 0
        self.begin()

    def begin(self) -> None:
        """Called before each example, with an empty engine whose clock is right."""

    @rule()
    def work(self) -> None:
        """Run all that is due."""
        self.engine.drain()

    @rule(point=st.integers(0, 7) | st.integers(0, 40))
    def work_and_die(self, point: int) -> None:
        """Run what is due in a worker that dies at a point; its leases run out."""
        self._workers += 1
        since = self.engine.server_time()
        script = Script((Fault("crash", point),), lambda fault: [])
        hand = self.engine.hand(f"worker {self._workers}", script)
        assert hand.probe is not None
        over = threading.Event()
        hand.probe.on_stop = over.set
        running = self.engine.start(hand.drain())
        running.add_done_callback(lambda _: over.set())
        assert over.wait(_PATIENCE), f"{hand.name} hangs"
        if hand.probe.stopped_by is None:
            running.result()
            self.engine.call(hand.retire())
            return
        hand.bury()
        hand.cut_transactions()
        self.engine.cut_sessions(since)
        self.engine.advance(LEASE + 1)
        self.engine.sweep()

    @rule(seconds=st.sampled_from([1, 60, 3600, 86400]))
    def time_passes(self, seconds: int) -> None:
        """Move the clock on and run what has become due."""
        self.engine.advance(seconds)
        self.engine.sweep()
        self.engine.drain()


_PATIENCE = 30.0
"""Real seconds that a worker may take."""


@functools.cache
def _engine_of(app: App) -> Engine:
    """Return the engine of a machine's App, for as long as the process lives."""
    database = scratch_database(None)
    engine = Engine(app, database.__enter__())
    atexit.register(database.__exit__, None, None, None)
    atexit.register(engine.close)
    return engine
