"""Broken copies of the engine that a handler can feel: crash_anywhere finds each by its handler.

The copies are those of tests/protocol, which catches all of them; so does this, for those in FELT.
The workers of crash_anywhere take turns, so no two statements overlap in it; that is why the rest
of the issue's twelve is in NOT_FELT. Of the others, these do not reach a handler at all: what the
sweep counts and charges (its workers hold one task at a time), which of many waiters or signals is
first, what an operator's retry does, how an end is acknowledged, and what only wastes a look.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psycopg
import pytest
import zoo_feeling as zoo
from tables import with_table

from leasetask import protocol
from leasetask.committer import Committer
from leasetask.testing import DoesNotSurvive, Engine, Fault, crash_anywhere
from leasetask.testing.engine import LEASE
from leasetask.testing.probe import Script

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "protocol"))
from mutants import MUTANTS  # noqa: E402  # of the tests beside these

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}

Options = dict[str, Any]
Felt = tuple[str, Callable[..., Any], Options, list[str]]

WAITS: Options = {"check": zoo.got_it_once, "signals": {"paid": "card"}}
BOOKS: Options = {"world": with_table, "check": zoo.booked_once}
STARTS: Options = {"check": zoo.started_in_turn, "only": "zombie@0 wake@1"}
UNDISTURBED = "nothing: it is wrong undisturbed"

FELT: list[Felt] = [
    (
        "no token check",
        zoo.books,
        {**BOOKS, "faults": ["zombie"]},
        ["froze", "'three', 'three'"],
    ),
    ("no token check", zoo.counts_its_starts, STARTS, ["woke when", "two starts with one number"]),
    (
        "no token check",
        zoo.waits_twice,
        {**WAITS, "only": "zombie@0 wake@0"},
        ["the frozen worker woke"],
    ),
    (
        "a checkpoint that overwrites",
        zoo.books,
        {**BOOKS, "faults": ["cut"]},
        ["the connection of worker A was lost", "'one', 'one'"],
    ),
    (
        "consumption outside the transaction",
        zoo.waits_twice,
        {**WAITS, "faults": []},
        [UNDISTURBED, "['card', 'card']"],
    ),
    (
        "attempts kept at each wake",
        zoo.naps,
        {"check": zoo.napped, "faults": []},
        [UNDISTURBED],
    ),
    (
        "key without input check",
        zoo.sends,
        {"check": zoo.second_refused, "faults": []},
        [UNDISTURBED],
    ),
    (
        "a token that stays the same",
        zoo.counts_its_starts,
        STARTS,
        ["two starts with one number"],
    ),
    (
        "a stored step is not looked for",
        zoo.books_a_page,
        {"world": with_table, "check": zoo.page_once, "faults": ["cut"]},
        ["the connection of worker A was lost"],
    ),
    (
        "a timeout that is not recorded",
        zoo.waits_twice,
        {**WAITS, "faults": []},
        [UNDISTURBED, "never ended"],
    ),
    (
        "a suspension born delivered",
        zoo.waits_twice,
        {**WAITS, "faults": []},
        [UNDISTURBED],
    ),
    (
        "a signal born delivered",
        zoo.asks,
        {"check": zoo.answered, "faults": []},
        [UNDISTURBED],
    ),
]

IN_A_RACE = "token check without a lock"
IN_A_BATCH = "two results of one task in one batch"

NOT_FELT = {
    "delivery before the commit": "a signal and a suspension have to commit at the same moment",
    "delivery that skips locked waiters": "somebody has to hold a waiter's row at that moment",
    "sweep without re-check": "a lease has to be renewed between the sweep's look and its lock",
    "sticky consumed": "waiters find the latch all the same; only its books are wrong",
    "a heartbeat without skip locked": "no heartbeat is sent: the clock moves when the test says",
}


def break_schema(dsn: str, name: str) -> None:
    broken = BY_NAME[name].apply((ROOT / "schema.sql").read_text())
    with psycopg.connect(dsn, autocommit=True) as db:
        db.execute("drop schema leasetask cascade")
        db.execute(broken.encode())


def test_each_of_the_twelve_is_felt_or_it_is_said_why_not() -> None:
    felt = {name for name, *_ in FELT} | {IN_A_RACE, IN_A_BATCH}
    twelve = {mutant.name for mutant in MUTANTS[:12]}
    assert twelve <= felt | NOT_FELT.keys()
    assert not felt & NOT_FELT.keys()


@pytest.mark.parametrize("task", dict.fromkeys(case[1] for case in FELT), ids=lambda t: t.__name__)
def test_the_handlers_are_right_on_the_engine_as_it_is(
    leasetask_db: str, task: Callable[..., Any]
) -> None:
    for _, _, options, _ in (case for case in FELT if case[1] is task):
        crash_anywhere(zoo.app, task, dsn=leasetask_db, **{"world": zoo.world.fresh, **options})


@pytest.mark.parametrize(
    ("name", "task", "options", "words"),
    FELT,
    ids=[f"{case[0]}, by {case[1].__name__}" for case in FELT],
)
def test_a_handler_feels_that_the_engine_is_broken(
    leasetask_db: str, name: str, task: Callable[..., Any], options: Options, words: list[str]
) -> None:
    break_schema(leasetask_db, name)
    with pytest.raises(DoesNotSurvive) as felt:
        crash_anywhere(zoo.app, task, dsn=leasetask_db, **{"world": zoo.world.fresh, **options})
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
    break_schema(leasetask_db, IN_A_BATCH)
    crash_anywhere(zoo.app, zoo.keeps_numbers, **options)
    with pytest.raises(DoesNotSurvive, match="the recorded use|used"):
        crash_anywhere(zoo.app, task, **options)


def test_a_token_check_without_a_lock_is_felt_in_a_race(leasetask_db: str) -> None:
    """While a worker's statement is under way, a sweep and a claim of another commit."""
    assert starts_after_a_race(leasetask_db) == [1]
    break_schema(leasetask_db, IN_A_RACE)
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
