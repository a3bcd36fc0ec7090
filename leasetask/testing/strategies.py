"""Hypothesis: schedules of faults as a strategy, and a state machine for tasks and signals together."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from leasetask.app import App
from leasetask.testing.engine import LEASE, Engine, Hand
from leasetask.testing.faults import ALL_FAULTS, Fault, FaultKind, Probe, Schedule
from leasetask.testing.server import scratch_database


def schedules(
    *, faults: Sequence[FaultKind] = ALL_FAULTS, most: int = 3, points: int = 100
) -> st.SearchStrategy[Schedule]:
    """Schedules for `Scenario.play`: so many faults at the most, shrinking to the fewest and earliest.

    Args:
        faults: which kinds.
        most: faults in one schedule; each hits the worker that goes on after the one before.
        points: the last point that may be hit; points that a run does not come to hit nothing.
    """
    one = st.builds(Fault, st.sampled_from(list(faults)), st.integers(0, points))
    return st.lists(one, max_size=most).map(tuple)


class EngineMachine(RuleBasedStateMachine):
    """A base for properties that span several tasks and signals.

    Set `app`, add rules that enqueue, signal and cancel through `self.engine`, and invariants. The
    rules here let workers work, die half-way, and time pass.
    """

    app: App

    @initialize()
    def begin(self) -> None:
        """Give each example an empty database and the right time."""
        self._database = scratch_database(None)
        self.engine = Engine(self.app, self._database.__enter__())
        self._dead: list[Hand] = []

    @rule()
    def work(self) -> None:
        """Run all that is due."""
        self.engine.drain()

    @rule(point=st.integers(0, 60))
    def work_and_die(self, point: int) -> None:
        """Run what is due in a worker that dies at a point; its leases run out."""
        probe = Probe(Fault("crash", point), lambda kind: None)
        hand = self.engine.hand(probe)
        running = self.engine.start(hand.drain_async())
        running.add_done_callback(lambda _: probe.stopped.set())
        probe.stopped.wait(20)
        hand.cut_transactions()
        hand.die()
        self.engine.advance(LEASE + 1)
        self.engine.sweep()

    @rule(seconds=st.sampled_from([1, 60, 3600, 86400]))
    def time_passes(self, seconds: int) -> None:
        """Move the clock on and run what has become due."""
        self.engine.advance(seconds)
        self.engine.drain()

    def teardown(self) -> None:
        """Let go of the database."""
        if hasattr(self, "engine"):
            self.engine.close()
            self._database.__exit__(None, None, None)
