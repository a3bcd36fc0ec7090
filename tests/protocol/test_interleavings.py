"""Two or three real connections, in every order of their steps, against the design's invariants.

After each order what nobody has looked at is delivered once more, as any worker does, and nothing
may be left asleep, lost or doubled. The programs stand in programs.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import programs
import pytest
from calls import CLOCK
from conftest import SOAK
from interleave import (
    ISOLATIONS,
    READ_COMMITTED,
    REPEATABLE_READ,
    SERIALIZABLE,
    Explorer,
    gated_database,
)

from leasetask import schema
from leasetask.testing.server import Databases

commits = pytest.mark.parametrize("commits", [True, False], ids=["commits", "rolls back"])
isolation = pytest.mark.parametrize("isolation", ISOLATIONS)


@pytest.fixture(scope="module")
def explorer(databases: Databases) -> Iterator[Explorer]:
    with databases.fresh() as dsn:
        explorer = Explorer(dsn)
        explorer.session.do(CLOCK)
        explorer.session.do("create table ledger (payment uuid)")
        yield explorer
        explorer.close()


@pytest.fixture(scope="module")
def stopper(databases: Databases) -> Iterator[Explorer]:
    """An explorer that can stop inside functions."""
    with gated_database(databases, schema.sql()) as dsn:
        explorer = Explorer(dsn)
        yield explorer
        explorer.close()


# --- signals and waits --------------------------------------------------------------------------


@commits
@isolation
@pytest.mark.parametrize("waiter", ["in a transaction", "and delivers", "and dies"])
def test_a_signal_meets_a_task_that_goes_to_wait(
    explorer: Explorer, isolation: str, commits: bool, waiter: str
) -> None:
    """H28, H44, invariant 4: the waiter is woken if and only if the caller committed.

    Also when the suspending worker or the deliverer dies between its commit and its delivery.
    """
    explorer.explore(programs.a_signal_meets_a_task_that_goes_to_wait(isolation, commits, waiter))


@commits
@isolation
def test_a_wait_for_is_hurried_by_what_its_check_could_not_see(
    explorer: Explorer, isolation: str, commits: bool
) -> None:
    """Decision 6: a signal committed after the check began hurries, one before never does."""
    explorer.explore(programs.a_wait_for_meets_a_signal(isolation, commits))


@commits
@isolation
def test_two_signals_meet_two_waiters(explorer: Explorer, isolation: str, commits: bool) -> None:
    """H28: each committed signal wakes exactly one waiter; a rolled-back one takes none with it."""
    explorer.explore(programs.two_signals_meet_two_waiters(isolation, commits))


def test_two_deliverers_and_a_timed_out_waiter_that_is_claimed(explorer: Explorer) -> None:
    """H28: one signal, two waiters, the older of which is claimed by its time: either gets it."""
    explorer.explore(programs.two_deliverers_and_a_claim())


@commits
@isolation
@pytest.mark.parametrize("signals", [1, 2])
def test_a_cancel_meets_the_delivery(
    explorer: Explorer, isolation: str, commits: bool, signals: int
) -> None:
    """Decision 6, H44: what is canceled before delivery leaves the signal to the next."""
    explorer.explore(programs.a_cancel_meets_the_delivery(isolation, commits, signals))


@commits
@isolation
def test_a_latch_is_cleared_beside_its_delivery(
    explorer: Explorer, isolation: str, commits: bool
) -> None:
    """A latch wakes whoever waited while it stood; nobody sleeps beside one that stands."""
    explorer.explore(programs.a_latch_is_cleared_beside_its_delivery(isolation, commits))


# --- leases -------------------------------------------------------------------------------------


@commits
@pytest.mark.parametrize("isolation", [READ_COMMITTED, REPEATABLE_READ])
def test_a_fenced_business_write_meets_the_sweep_and_the_next_owner(
    explorer: Explorer, isolation: str, commits: bool
) -> None:
    """H02, H04, invariants 1, 2, 8: the write is there if and only if its checkpoint is."""
    explorer.explore(programs.a_fenced_write_meets_the_sweep(isolation, commits))


@commits
@isolation
@pytest.mark.parametrize("compensations", [0, 1])
@pytest.mark.parametrize("end", programs.ENDS)
def test_the_end_of_a_run_meets_a_cancel(
    explorer: Explorer, isolation: str, commits: bool, end: str, compensations: int
) -> None:
    """Decision 7, H44: whoever comes second knows of the other; no cancel is forgotten."""
    explorer.explore(
        programs.the_end_of_a_run_meets_a_cancel(isolation, commits, end, compensations)
    )


@commits
def test_three_claims(explorer: Explorer, commits: bool) -> None:
    """H21, invariant 1: each task has one owner, nobody waits, nobody gets more than was asked."""
    explorer.explore(programs.three_claims(commits))


def test_a_claim_is_not_held_up_by_rows_that_a_user_holds(explorer: Explorer) -> None:
    """H43: an open transaction on the head of one lane hides no task of another."""
    explorer.explore(programs.a_claim_meets_a_cancel())


@pytest.mark.parametrize("budget", ["left", "spent"])
def test_a_heartbeat_meets_the_sweep_and_the_prune(explorer: Explorer, budget: str) -> None:
    """H01, H05: a renewed or finished task is not swept, a swept one is not renewed or finished."""
    explorer.explore(programs.a_heartbeat_meets_the_sweep_and_the_prune(budget))


@commits
@isolation
def test_a_cancel_in_an_open_transaction_holds_up_one_task_of_a_batch(
    explorer: Explorer, isolation: str, commits: bool
) -> None:
    """H43: the heartbeat of the others goes on; the held one is told to be `locked`."""
    explorer.explore(programs.a_batch_of_heartbeats_meets_a_cancel(isolation, commits))


def test_two_sweeps(explorer: Explorer) -> None:
    """H01: nobody is swept twice or left, nobody waits, and both know how many the owner held."""
    explorer.explore(programs.two_sweeps())


# --- producers and operators --------------------------------------------------------------------


@commits
@pytest.mark.parametrize("inputs", ["equal", "different"])
@pytest.mark.parametrize(
    ("isolation", "other"),
    [
        (READ_COMMITTED, READ_COMMITTED),
        (REPEATABLE_READ, READ_COMMITTED),
        (REPEATABLE_READ, REPEATABLE_READ),
        (SERIALIZABLE, READ_COMMITTED),
        (SERIALIZABLE, SERIALIZABLE),
    ],
)
def test_two_producers_use_one_key(
    explorer: Explorer, isolation: str, other: str, commits: bool, inputs: str
) -> None:
    """H44, invariant 7, decision 10: one task, known to both, and never no answer."""
    explorer.explore(programs.two_producers_use_one_key(isolation, other, commits, inputs))


@isolation
def test_three_producers_of_many_keys_in_different_orders(
    explorer: Explorer, isolation: str
) -> None:
    """H44: many keys in any order never deadlock, and each input has its answer."""
    explorer.explore(programs.three_producers_of_many_keys(isolation))


@commits
@isolation
def test_a_retry_meets_the_prune(explorer: Explorer, isolation: str, commits: bool) -> None:
    """Decision 13: the operator's retry gets the whole input, or an answer that says it is gone."""
    explorer.explore(programs.a_retry_meets_the_prune(isolation, commits))


# --- stopped inside the functions ---------------------------------------------------------------


def deliveries() -> Iterator[Any]:
    """Give what runs beside a delivery, and what there is to deliver; everything in a soak."""
    for beside, steps in programs.BESIDE_A_DELIVERY.items():
        short, suspends = len(steps) == 1, "suspension" in beside
        if SOAK or short or not suspends:
            for signals in (0, 1, 2) if SOAK else (0, 1) if short else (0,):
                yield beside, signals, 2, "signal", False
                if SOAK or (short and signals):
                    yield beside, signals, 2, "signal", True
        if SOAK or short:
            yield beside, 0, 2, "hurry", SOAK
        if suspends:
            yield beside, 0, 0, "signal", SOAK
            if SOAK or short:
                yield beside, 0, 0, "hurry", SOAK


@pytest.mark.parametrize(("beside", "signals", "waiters", "mode", "rows"), list(deliveries()))
def test_a_delivery_is_stopped_everywhere(
    stopper: Explorer, beside: str, signals: int, waiters: int, mode: str, rows: bool
) -> None:
    """H28, decision 6: nothing that commits inside a delivery is slept over afterwards."""
    stopper.explore(programs.a_delivery_is_stopped(beside, signals, waiters, mode=mode, rows=rows))


@pytest.mark.parametrize("mode", ["signal", "hurry"])
@pytest.mark.parametrize(
    ("beside", "waiters"),
    [
        (beside, waiters)
        for beside, steps in programs.BESIDE_A_DELIVERY.items()
        for waiters in (0, 2)
        if (SOAK or len(steps) == 1) and (waiters or "older waiter" not in beside)
    ],
)
def test_a_signal_that_looks_before_its_commit_is_stopped_everywhere(
    stopper: Explorer, beside: str, waiters: int, mode: str
) -> None:
    """H28: what a signal hands out in its own transaction takes nothing from its delivery."""
    how = programs.signal_now, programs.SIGNAL_NOW
    stopper.explore(programs.a_delivery_is_stopped(beside, 0, waiters, mode=mode, stopped=how))


def test_a_delivery_meets_a_waiter_that_now_waits_elsewhere(stopper: Explorer) -> None:
    """H02, decision 6: a signal of one topic never becomes the result of a wait on another."""
    stopper.explore(programs.a_delivery_meets_a_waiter_that_moves_on())


@pytest.mark.parametrize("call", programs.HOLDER_CALLS)
def test_the_holder_is_stopped_everywhere_while_its_lease_is_swept(
    stopper: Explorer, call: str
) -> None:
    """H01, H02, H04, invariant 1: the next owner is never written over, whenever the first wakes."""
    stopper.explore(programs.the_holder_is_stopped_while_it_is_swept(call))


@pytest.mark.parametrize("budget", ["left", "spent"])
@pytest.mark.parametrize("call", programs.HOLDER_CALLS)
def test_the_sweep_is_stopped_everywhere_while_the_holder_comes_back(
    stopper: Explorer, call: str, budget: str
) -> None:
    """H01, H04, H05: what the holder wrote in time stands; the sweep looks again under the lock."""
    stopper.explore(programs.the_sweep_is_stopped_while_the_holder_returns(call, budget))


@pytest.mark.parametrize("beside", programs.BESIDE_A_CLAIM)
def test_a_claim_is_stopped_everywhere(stopper: Explorer, beside: str) -> None:
    """H18, H21: a waiter taken by time is taken as it then is: once, and with one result."""
    stopper.explore(programs.a_claim_is_stopped(beside))


@pytest.mark.parametrize("end", ["finish", "suspend", "release", "fail"])
def test_a_cancel_is_stopped_everywhere(stopper: Explorer, end: str) -> None:
    """Decision 7: whatever becomes of the task meanwhile, a cancel is never forgotten."""
    stopper.explore(programs.a_cancel_is_stopped(end))


@pytest.mark.parametrize("beside", programs.BESIDE_AN_ENQUEUE)
@pytest.mark.parametrize("before", ["nothing", "finished"])
def test_an_enqueue_is_stopped_everywhere(stopper: Explorer, beside: str, before: str) -> None:
    """Decision 10: idempotency has no window; there is always an answer, and the task it names."""
    stopper.explore(programs.an_enqueue_is_stopped(beside, before))


@pytest.mark.parametrize("stopped", ["prune", "retry"])
def test_a_prune_or_a_retry_is_stopped_everywhere(stopper: Explorer, stopped: str) -> None:
    """Invariant 5: a task that runs again is not emptied."""
    stopper.explore(programs.a_prune_meets_a_retry(stopped))
