"""Broken copies of the engine that a handler can feel: crash_anywhere finds each by its handler.

Not here, because no handler can feel them in it: its workers' statements never overlap, and these
go wrong only when two do.

- a sweep without its second look: between the look and the lock somebody has to renew the lease;
- delivery that skips locked waiters, and delivery before the commit: a waiter sleeps on beside its
  signal only if a transaction is open on the row, or commits, at that moment;
- a heartbeat without `skip locked`: the harness keeps leases by moving no clock, and sends none.

`tests/protocol` catches these, and all others once more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psycopg
import pytest
import zoo_feeling as zoo

from leasetask import protocol
from leasetask.committer import Committer
from leasetask.testing import DoesNotSurvive, Engine, Fault, crash_anywhere
from leasetask.testing.engine import LEASE
from leasetask.testing.probe import Script

SCHEMA = (Path(__file__).parents[2] / "schema.sql").read_text()

TAKE = """    from leasetask.task t where t.id = i.id
    for no key update of t skip locked
"""
REFUSE_TWO = """  if cardinality(ids) > 1
     and (select count(distinct i) from unnest(ids) i) < cardinality(ids) then
"""
CONSUME = """    update leasetask.task_signal s set consumed_by = p.task, consumed_at = now_
    from pair p where s.id = p.signal
"""

MUTANTS = {
    "no token check": [("coalesce(t.lease_token = i.token, false) as held", "true as held")],
    "token check without a lock": [(TAKE, TAKE.replace("for no key update of t skip locked", ""))],
    "a checkpoint that overwrites": [
        ("      and not t.state ?| array(select jsonb_object_keys(i.patch))\n", "")
    ],
    "two results of one task in one batch": [(REFUSE_TWO, "  if false then\n")],
    # The records travel with the delivery, the mark that says so would come later.
    "consumption outside the transaction": [
        (CONSUME, "    update leasetask.task_signal s set undelivered = false where false\n")
    ],
    "attempts kept at each wake": [
        (
            "      attempts = 0, swept = 0, suspect = false,\n      wait_mode = i.mode",
            "      swept = 0, suspect = false,\n      wait_mode = i.mode",
        )
    ],
    "sticky consumed": [
        (CONSUME, CONSUME.replace("p.signal\n", "p.signal or s.topic = deliver_topic.topic\n")),
        (
            "signal_latch_is_not_consumed check (not sticky or consumed_by is null)",
            "signal_latch_is_not_consumed check (true)",
        ),
        (
            "s.topic = deliver_topic.topic and s.sticky order by",
            "s.topic = deliver_topic.topic and s.sticky and s.consumed_by is null order by",
        ),
    ],
    "key without input check": [
        (
            "when t.pruned_at is null and t.input = i.input then 'existing'",
            "when t.pruned_at is null then 'existing'",
        )
    ],
}


def break_schema(dsn: str, name: str) -> None:
    broken = SCHEMA
    for right, wrong in MUTANTS[name]:
        assert broken.count(right) == 1, f"schema.sql has changed: {right!r}"
        broken = broken.replace(right, wrong)
    with psycopg.connect(dsn, autocommit=True) as db:
        db.execute("alter table leasetask.task_signal drop constraint signal_latch_is_not_consumed")
        db.execute(broken.encode())


FELT = [
    (
        "no token check",
        zoo.books,
        {"world": zoo.with_table, "check": zoo.booked_once, "faults": ["zombie"]},
        ["froze", "'three', 'three'"],
    ),
    (
        "no token check",
        zoo.waits_twice,
        {"check": zoo.got_it_once, "signals": {"paid": "card"}, "faults": ["zombie"]},
        ["the frozen worker woke"],
    ),
    (
        "a checkpoint that overwrites",
        zoo.books,
        {"world": zoo.with_table, "check": zoo.booked_once, "faults": ["cut"]},
        ["the connection of worker A was lost", "'one', 'one'"],
    ),
    (
        "consumption outside the transaction",
        zoo.waits_twice,
        {"check": zoo.got_it_once, "signals": {"paid": "card"}, "faults": []},
        ["nothing: it is wrong undisturbed", "['card', 'card']"],
    ),
    (
        "attempts kept at each wake",
        zoo.naps,
        {"check": zoo.napped, "faults": []},
        ["nothing: it is wrong undisturbed"],
    ),
    (
        "sticky consumed",
        zoo.passes_twice,
        {"world": zoo.with_a_latch, "check": zoo.passed_twice, "faults": []},
        ["nothing: it is wrong undisturbed", "SignalTimeout"],
    ),
    (
        "key without input check",
        zoo.sends,
        {"check": zoo.second_refused, "faults": []},
        ["nothing: it is wrong undisturbed"],
    ),
]

Options = dict[str, Any]
IDS = [f"{case[0]}, by {case[1].__name__}" for case in FELT]


@pytest.mark.parametrize(("name", "task", "options", "words"), FELT, ids=IDS)
def test_a_handler_feels_that_the_engine_is_broken(
    leasetask_db: str, name: str, task: Callable[..., Any], options: Options, words: list[str]
) -> None:
    options = {"world": zoo.world.fresh, **options}
    crash_anywhere(zoo.app, task, dsn=leasetask_db, **options)
    break_schema(leasetask_db, name)
    with pytest.raises(DoesNotSurvive) as felt:
        crash_anywhere(zoo.app, task, dsn=leasetask_db, **options)
    for word in words:
        assert word in str(felt.value), str(felt.value)


def test_two_results_in_one_batch_are_felt_once_the_worker_does_not_merge_them(
    leasetask_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Options = {
        "world": zoo.world.fresh,
        "check": zoo.same_numbers,
        "faults": ["crash"],
        "dsn": leasetask_db,
    }

    def take_each_alone(self: Any, kind: type) -> list[list[Any]]:
        queue = self._queues[kind]
        if queue and queue[0].alone:
            return [[queue.pop(0)]]
        self._queues[kind] = []
        return [[entry] for entry in queue]

    task = zoo.keeps_numbers_of_branches
    monkeypatch.setattr(Committer, "_take", take_each_alone)
    crash_anywhere(zoo.app, task, **options)  # the server refuses, and the worker sends each alone
    break_schema(leasetask_db, "two results of one task in one batch")
    crash_anywhere(zoo.app, zoo.keeps_numbers, **options)
    with pytest.raises(DoesNotSurvive, match="the recorded use|used"):
        crash_anywhere(zoo.app, task, **options)


def test_a_token_check_without_a_lock_is_felt_in_a_race(leasetask_db: str) -> None:
    """While a worker's statement is under way, a sweep and a claim of another commit."""
    assert starts_after_a_race(leasetask_db) == [1]
    break_schema(leasetask_db, "token check without a lock")
    assert starts_after_a_race(leasetask_db) == [1, 1], "two starts, and nobody has reconciled"


def starts_after_a_race(dsn: str) -> list[int]:
    """Race at the point before the commit of an effect's start; returns the starts' numbers."""
    with Engine(zoo.app, dsn) as engine, psycopg.connect(dsn) as other:
        engine.reset()
        zoo.world.fresh()
        task = engine.enqueue(zoo.counts_its_starts)
        claimed: list[tuple[Any, ...]] = []

        def race(fault: Fault) -> Iterable[Future[Any]]:
            engine.advance(LEASE + 1)
            other.execute(*protocol.sweep(10))
            query = protocol.claim("worker B", zoo.app.registry.pairs(), 1, LEASE)
            claimed.extend(other.execute(*query).fetchall())
            threading.Timer(0.2, other.commit).start()
            return []

        # Any fault that leaves the worker running will do: what it does is `race`.
        engine.call(engine.hand("worker A", Script((Fault("double", 0),), race)).drain())
        assert [str(row[0]) for row in claimed] == [task.id]
        engine.call(engine.hand("worker B").run(claimed[0]))
        assert engine.get(task).status == "succeeded"
    return [number for number, _ in zoo.world.starts]
