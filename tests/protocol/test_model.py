"""The SQL functions against the plain-Python model: any calls in any order, the same answers and rows.

Several workers with tokens current, stale and made up, repeated calls, batches, crashes (a worker is
simply not heard of again), and a clock that is moved and never waited for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from datetime import datetime
from math import inf
from typing import Any
from uuid import UUID

import hypothesis.strategies as st
import invariants
import pytest
from calls import CLOCK, LEASE, START, Session, scratch
from conftest import SOAK
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model import FINISHED, Answer, Handle, Model, Task, Wait

from leasetask.testing.server import Databases

KINDS = ("k", "l")
TOPICS = ("t", "u")
OWNERS = ("one", "two", "three")
STEPS = ("a", "b", "c", "d", "e")
INPUTS: tuple[Any, ...] = (1, {"x": 1, "y": [1, 2]}, {"y": [1.0, 2], "x": 1}, {"x": 1, "y": [2, 1]})
NOBODYS = UUID(int=1)

MODEL_ONLY = ("steps", "first_input", "known_signals", "wait_until")
COMPARED = [f.name for f in fields(Task) if f.name not in MODEL_ONLY]
TIMES = [name for name in COMPARED if name.endswith(("_at", "_since")) or name == "deadline"]
TIMES.append("lease_until")
UUIDS = ("id", "lease_token", "released_token")

_TASKS = "select to_jsonb(t), leasetask.recorded_steps(t.id) from leasetask.task t"
_SIGNALS = "select to_jsonb(s) from leasetask.task_signal s"

picks = st.lists(st.integers(0, 99), min_size=1, max_size=3)
"""Which handles a batch holds: even numbers pick among the current, odd ones among all there were."""


def seconds(at: str | None) -> float | None:
    """Read a time of to_jsonb as seconds of the test's clock."""
    if at is None or at == "infinity":
        return None if at is None else inf
    return (datetime.fromisoformat(at) - START).total_seconds()


class Protocol(RuleBasedStateMachine):
    """Drives the database and the model side by side."""

    session: Session

    @initialize(
        budgets=st.lists(st.sampled_from((1, 2, 3)), min_size=1, max_size=3),
        owners=st.lists(st.sampled_from(OWNERS), min_size=3, max_size=3),
    )
    def begin(self, budgets: list[int], owners: list[str]) -> None:
        self.session.clear()
        self.session.at(0)
        self.model = Model()
        self.handles: list[Handle] = []
        self.snapshots: list[tuple[str, int]] = []
        self.ended: dict[UUID, Task] = {}
        self.made = 0
        self.last_signal = 0
        self.look()
        policy = {"priority": 0, "delay": 0, "deadline": None}
        for budget, owner in zip(budgets, owners, strict=False):
            self.enqueue("k", [None], [1], **policy, max_attempts=budget)
            self.claim(owner, 1, KINDS, False)

    # --- time and producers -------------------------------------------------------------------

    @rule(by=st.sampled_from((1, 1, 2, 5, 10, LEASE + 1, 100, 90_000)))
    def time_passes(self, by: int) -> None:
        self.model.now += by
        self.session.at(self.model.now)

    @rule(
        kind=st.sampled_from((*KINDS, "k")),
        keys=st.lists(st.sampled_from(("p", "q", "r", "s", None)), min_size=1, max_size=3),
        inputs=st.lists(st.sampled_from(INPUTS), min_size=3, max_size=3),
        priority=st.sampled_from((0, 0, 1)),
        delay=st.sampled_from((0, 0, 0, 5)),
        max_attempts=st.sampled_from((1, 2, 3)),
        deadline=st.sampled_from((None, None, None, 20, 150)),
    )
    def enqueue(self, kind: str, keys: list[str | None], inputs: list[Any], **policy: Any) -> None:
        inputs = inputs[: len(keys)]
        rows = self.session.call(
            "enqueue_many", kind=kind, keys=keys, inputs=inputs, backoff_jitter=0, **policy
        )
        assert sorted(row.ord for row in rows) == list(range(1, len(keys) + 1))
        # Which of two new inputs of one key comes first is open: the new one, as it turned out.
        for row in sorted(rows, key=lambda row: (row.outcome != "new", row.ord)):
            key, input = keys[row.ord - 1], inputs[row.ord - 1]
            expected = self.model.enqueue(row.id, kind, key, input, **policy)
            assert (row.id, row.outcome, row.stored_input) == expected

    # --- claims -------------------------------------------------------------------------------

    @rule(
        owner=st.sampled_from(OWNERS),
        n=st.integers(1, 4),
        kinds=st.sampled_from((KINDS, ("k",), ("l", "k"), KINDS)),
        suspects=st.sampled_from((False, False, False, True)),
    )
    def claim(self, owner: str, n: int, kinds: tuple[str, ...], suspects: bool) -> None:
        rows = self.session.call(
            "claim",
            owner=owner,
            kinds=list(kinds),
            versions=[1] * len(kinds),
            n=n,
            lease=LEASE,
            suspects=suspects,
        )
        taken = [row for row in rows if row.id is not None]
        chosen = [(row.id, row.lease_token) for row in taken]
        due = self.model.claim(owner, kinds, n, LEASE, chosen, suspects=suspects)
        self.handles += chosen
        told = [(row.next_run_at - START).total_seconds() for row in rows if row.id is None]
        assert told == ([due] if len(taken) < n and due < inf else [])
        for row in taken:
            task = self.model.tasks[row.id]
            assert row.cancel_requested == (task.cancel_requested_at is not None)
            assert (row.attempts, row.runs) == (task.attempts, task.runs)
            assert row.compensating == task.compensating
            assert row.open_steps == task.open_steps
            assert row.stored_steps + len(row.state) == len(task.steps)
            assert row.state.items() <= task.steps.items()

    # --- what holders do ----------------------------------------------------------------------

    def batch(self, numbers: Sequence[int]) -> list[Handle]:
        """Choose handles, at most one for each task."""
        current = [
            (t.id, t.lease_token) for t in self.model.tasks.values() if t.lease_token is not None
        ]
        stale: list[Handle] = [*self.handles, (NOBODYS, NOBODYS)]
        for id in self.model.tasks:
            stale += (id, None), (id, NOBODYS)
        chosen = dict[UUID, Handle]()
        for number in numbers:
            pool = current if number % 2 == 0 and current else stale
            handle = pool[number // 2 % len(pool)]
            chosen.setdefault(handle[0], handle)
        return list(chosen.values())

    @rule(owner=st.sampled_from(OWNERS), suspects=st.booleans())
    def claim_all(self, owner: str, suspects: bool) -> None:
        self.claim(owner, 100, KINDS, suspects)

    def call(self, name: str, batch: list[Handle], **more: Any) -> list[Answer]:
        """Call a function for a batch and return its answers in order."""
        rows = self.session.call(
            name, ids=[id for id, _ in batch], tokens=[token for _, token in batch], **more
        )
        assert [row.ord for row in rows] == list(range(1, len(batch) + 1))
        return [tuple(row[1:]) for row in rows]

    @rule(numbers=picks, progress=st.sampled_from((None, {"done": 1}, {"done": 2})))
    def heartbeat(self, numbers: list[int], progress: Any) -> None:
        batch = self.batch(numbers)
        answers = self.call("heartbeat", batch, lease=LEASE, progress=[progress] * len(batch))
        assert answers == [self.model.heartbeat(h, LEASE, progress) for h in batch]

    @rule(
        numbers=picks,
        names=st.sets(st.sampled_from(STEPS), min_size=1, max_size=3),
        size=st.sampled_from((1, 1, 900, 2500)),
        registered=st.sampled_from((0, 0, 0, 1)),
    )
    def checkpoint(self, numbers: list[int], names: set[str], size: int, registered: int) -> None:
        batch = self.batch(numbers)
        patches = []
        for _ in batch:
            patch: dict[str, Any] = {}
            for name in sorted(names):
                self.made += 1
                patch[name] = {"n": self.made, "ok": "x" * size}
            if registered:
                patch[min(patch)]["compensate"] = True
            patches.append(patch)
        counts = [registered] * len(batch)
        answers = self.call("checkpoint", batch, patches=patches, lease=LEASE, compensations=counts)
        assert answers == [
            self.model.checkpoint(handle, patch, LEASE, registered)
            for handle, patch in zip(batch, patches, strict=True)
        ]

    @rule(
        numbers=picks,
        name=st.sampled_from(STEPS),
        note=st.sampled_from(({"started": 1}, {"started": 1, "tries": 1}, {"tries": 2})),
    )
    def note(self, numbers: list[int], name: str, note: Any) -> None:
        batch = self.batch(numbers)
        answers = self.call("note", batch, patches=[{name: note}] * len(batch), lease=LEASE)
        assert answers == [self.model.note(h, {name: note}, LEASE) for h in batch]

    @rule(numbers=picks)
    def abandon(self, numbers: list[int]) -> None:
        batch = self.batch(numbers)
        assert self.call("abandon", batch, seconds=5) == [self.model.abandon(h, 5) for h in batch]

    @rule(numbers=picks, result=st.sampled_from((None, 1, {"r": "s"})))
    def finish(self, numbers: list[int], result: Any) -> None:
        batch = self.batch(numbers)
        answers = self.call("finish", batch, results=[result] * len(batch))
        assert answers == [self.model.finish(h, result) for h in batch]

    @rule(
        numbers=picks,
        mode=st.sampled_from(("signal", "signal", "hurry", "sleep")),
        topic=st.sampled_from(TOPICS),
        timeout=st.sampled_from((None, 3, 50)),
        older=st.booleans(),
    )
    def suspend(
        self, numbers: list[int], mode: str, topic: str, timeout: int | None, older: bool
    ) -> None:
        batch = self.batch(numbers)
        snapshot, known = self.snapshots[-2:][0 if older else -1]
        waits = []
        for _ in batch:
            self.made += 1
            waits.append(
                Wait(
                    mode,
                    f"{mode}-{self.made}" if mode != "hurry" else "check",
                    None if mode == "hurry" else self.made,
                    None if mode == "sleep" else topic,
                    60 if mode == "sleep" else timeout,
                    known if mode == "hurry" else 0,
                )
            )
        answers = self.call(
            "suspend",
            batch,
            modes=[w.mode for w in waits],
            names=[w.name for w in waits],
            seqs=[w.seq for w in waits],
            topics=[w.topic for w in waits],
            seconds=[w.seconds for w in waits],
            untils=[None for _ in waits],
            snapshots=[snapshot if w.mode == "hurry" else None for w in waits],
        )
        assert answers == [
            self.model.suspend(handle, wait) for handle, wait in zip(batch, waits, strict=True)
        ]

    @rule(
        numbers=picks,
        delay=st.sampled_from((None, 0, 7)),
        note=st.sampled_from(({}, {"a": {"tries": 1}})),
    )
    def release(self, numbers: list[int], delay: int | None, note: Any) -> None:
        batch = self.batch(numbers)
        many = len(batch)
        answers = self.call("release", batch, delays=[delay] * many, notes=[note] * many)
        assert answers == [self.model.release(h, delay, note) for h in batch]

    @rule(
        numbers=picks,
        error=st.sampled_from(({"type": "E"}, {"type": "StepFailed", "n": 2})),
        retryable=st.sampled_from((True, True, False)),
        outright=st.sampled_from((False, False, False, True)),
    )
    def fail(self, numbers: list[int], error: Any, retryable: bool, outright: bool) -> None:
        batch = self.batch(numbers)
        many = len(batch)
        answers = self.call(
            "fail",
            batch,
            errors=[error] * many,
            retryable=[retryable] * many,
            outright=[outright] * many,
        )
        assert answers == [
            self.model.fail(h, error, retryable=retryable, outright=outright) for h in batch
        ]

    # --- signals ------------------------------------------------------------------------------

    @rule()
    def look(self) -> None:
        """Take the snapshot that a wait_for takes before its check."""
        snapshot = self.session.scalar("select pg_current_snapshot()::text")
        self.snapshots.append((snapshot, self.last_signal))

    @rule(
        topic=st.sampled_from(TOPICS),
        payload=st.sampled_from((None, 1, {"by": "card"})),
        sticky=st.sampled_from((False, False, False, True)),
    )
    def signal(self, topic: str, payload: Any, sticky: bool) -> None:
        self.last_signal = self.session.signal(topic, payload, sticky=sticky)
        self.model.signal(self.last_signal, topic, payload, sticky=sticky)

    @rule(topic=st.sampled_from(TOPICS))
    def clear_signal(self, topic: str) -> None:
        assert self.session.value("clear_signal", topic=topic) == self.model.clear_signal(topic)

    @rule(topics=st.lists(st.sampled_from(TOPICS), min_size=1, max_size=2))
    def deliver(self, topics: list[str]) -> None:
        rows = [tuple(row) for row in self.session.deliver(topics)]
        assert rows == [(t, *self.model.deliver(t)) for t in sorted(set(topics))]

    @rule()
    def deliver_what_nobody_has_looked_at(self) -> None:
        topics = {row[0] for row in self.session.call("undelivered_topics")}
        assert topics == self.model.undelivered_topics()
        for topic in topics:
            self.model.deliver(topic)
        invariants.check_delivered(self.session)

    # --- operators ----------------------------------------------------------------------------

    @precondition(lambda self: self.model.tasks)
    @rule(number=st.integers(0, 99))
    def cancel(self, number: int) -> None:
        id = self.any_task(number)
        answer = self.session.value("cancel", task=id, reason=f"reason {number}")
        assert answer == self.model.cancel(id, f"reason {number}")

    @precondition(lambda self: self.model.tasks)
    @rule(number=st.integers(0, 99))
    def retry(self, number: int) -> None:
        ended = [t.id for t in self.model.tasks.values() if t.status in FINISHED]
        id = ended[number % len(ended)] if ended else self.any_task(number)
        self.ended.pop(id, None)
        allowed = self.model.retry(id)
        try:
            self.session.call("retry", task=id)
        except self.session.conn.DatabaseError as error:
            assert error.sqlstate == "LT003"
            assert not allowed
        else:
            assert allowed

    @rule(n=st.sampled_from((1, 2, 1000, 1000)))
    def sweep(self, n: int) -> None:
        rows = self.session.call("sweep", n=n)
        assert all(row.error is None for row in rows)
        self.model.sweep(n, [(row.id, row.outcome) for row in rows])

    @rule(
        age=st.sampled_from((0, 5, 100_000)),
        signal_age=st.sampled_from((0, 100, 1e6)),
        forget=st.sampled_from((False, False, True)),
    )
    def prune(self, age: float, signal_age: float, forget: bool) -> None:
        self.ended.clear()
        pruned = self.session.value("prune", age=age, signal_age=signal_age, forget_keys=forget)
        assert pruned == self.model.prune(age, signal_age, forget_keys=forget)

    def any_task(self, number: int) -> UUID:
        return list(self.model.tasks)[number % len(self.model.tasks)]

    # --- after each ---------------------------------------------------------------------------

    @invariant()
    def the_rows_are_as_the_model_says(self) -> None:
        found = self.session.rows(_TASKS)
        assert len(found) == len(self.model.tasks)
        for row, steps in found:
            task = self.model.tasks[UUID(row["id"])]
            assert steps == task.steps
            for name in TIMES:
                row[name] = seconds(row[name])
            for name in UUIDS:
                row[name] = UUID(row[name]) if row[name] else None
            if row["last_error"] is not None:
                row["last_error"] = {
                    k: row["last_error"][k] for k in ("type", "n") if k in row["last_error"]
                }
            expected = {name: getattr(task, name) for name in COMPARED}
            assert {name: row[name] for name in COMPARED} == expected
        signals = self.session.rows(_SIGNALS)
        assert len(signals) == len(self.model.signals)
        for (row,) in signals:
            signal = self.model.signals[row["id"]]
            consumer = UUID(row["consumed_by"]) if row["consumed_by"] else None
            assert (row["topic"], row["payload"], row["sticky"], row["undelivered"]) == (
                signal.topic, signal.payload, signal.sticky, signal.undelivered,
            )  # fmt: skip
            assert (consumer, seconds(row["consumed_at"])) == (
                signal.consumed_by,
                signal.consumed_at,
            )

    @invariant()
    def what_always_holds(self) -> None:
        invariants.check(self.session)

    @invariant()
    def a_finished_task_never_changes(self) -> None:
        """Invariant 5: but for an operator's retry, and prune."""
        now = self.model.finished()
        for id, task in self.ended.items():
            assert now.get(id) == task
        self.ended = now


@pytest.fixture
def session(databases: Databases) -> Iterator[Session]:
    with databases.fresh() as dsn:
        session = scratch(dsn)
        session.do(CLOCK)
        session.do("set timezone = 'UTC'")
        yield session
        session.conn.close()


def test_the_database_does_what_the_model_says(session: Session) -> None:
    """Invariants 1 to 7 of the design, rule by rule."""

    class Bound(Protocol):
        pass

    Bound.session = session
    run_state_machine_as_test(
        Bound,
        settings=settings(
            max_examples=20_000 if SOAK else 80,
            stateful_step_count=60 if SOAK else 40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            print_blob=True,
        ),
    )
