"""The zoo of wrong handlers: each is caught, and the report names the true cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zoo_wrong as zoo
from tables import with_table
from zoo_wrong import (
    anything,
    approved_by_two,
    booked_once,
    charged_once,
    mailed_once,
    not_twice_refunded,
    nothing_kept,
    shipped_if_paid,
    succeeded,
    world,
)

from leasetask.model import TaskView
from leasetask.testing import DoesNotSurvive, crash_anywhere
from leasetask.testing.server import Databases


@pytest.fixture(scope="module")
def scratch(leasetask_databases: Databases) -> Iterator[str]:
    """One database for all tests here: each run empties it."""
    with leasetask_databases.fresh() as dsn:
        yield dsn


fresh = world.fresh
LOOSE = ("crash", "zombie", "cut", "double", "silence")

Case = tuple[Callable[..., Any], Callable[..., Any], dict[str, Any], list[str]]

WRONG: list[Case] = [
    (
        zoo.charges_outside_a_step,
        charged_once,
        {},
        ["died before the body of 'mail'", "2 charges", "outside of its steps"],
    ),
    (
        zoo.charges_in_a_plain_step,
        charged_once,
        {},
        [
            "worker A died after the body of 'charge' returned and before its checkpoint",
            "worker B ran the body of 'charge' again",
            "check: 2 charges",
            "charges=['order', 'order']",
            "step 'charge' runs again",
            "ctx.effect",
            "ctx.transaction",
            "idempotency key",
        ],
    ),
    (
        zoo.charges_beside_a_harmless_branch,
        charged_once,
        {},
        ["step 'charge' runs again", "ctx.effect"],
    ),
    (
        zoo.charges_in_a_transaction,
        charged_once,
        {},
        [
            "before the commit of transaction 'mark'",
            "rolled back and ran again",
            "into a ctx.effect",
        ],
    ),
    (
        zoo.charges_in_a_check,
        charged_once,
        {},
        ["the check of wait_for 'approved'", "may only look"],
    ),
    (
        zoo.books_outside_a_transaction,
        booked_once,
        {"world": with_table},
        ["step 'book' runs again", "2 rows", "ctx.transaction (for a write in this database)"],
    ),
    (
        zoo.mails_after_complete,
        mailed_once,
        {"faults": ["crash"]},
        ["died after the commit of transaction 'complete'", "what follows ctx.complete"],
    ),
    (
        zoo.says_not_done,
        charged_once,
        {},
        ["the reconcile of effect 'charge' said NotDone of what had happened"],
    ),
    (
        zoo.says_done,
        charged_once,
        {},
        [
            "the reconcile of effect 'charge' said Done of what had not happened",
            "its do never ran",
            "0 charges",
        ],
    ),
    (
        zoo.cannot_tell,
        charged_once,
        {},
        ["EffectUnknown", "reconcile of effect 'charge' cannot tell", "awaits a person"],
    ),
    (
        zoo.hands_no_key,
        charged_once,
        {},
        ["froze after the start of 'charge' was committed", "in two processes", "hand attempt.key"],
    ),
    (
        zoo.uses_a_name_twice,
        anything,
        {},
        ["nothing: it is wrong undisturbed", "DuplicateStep", "'copy'", "a name of its own"],
    ),
    (
        zoo.depends_on_the_time,
        anything,
        {},
        ["step 'report' is asked for with other arguments", "time", "work it out in one"],
    ),
    (
        zoo.branches_at_random,
        anything,
        {"pairs": "all"},
        ["NonDeterminismError", "without asking for the recorded by ", "random numbers"],
    ),
    (
        zoo.branches_on_the_outside,
        anything,
        {},
        ["NonDeterminismError", "without asking for the recorded charge", "the outside"],
    ),
    (
        zoo.leaves_its_result_in_memory,
        succeeded,
        {"faults": LOOSE},
        ["KeyError", "what they left in memory is not there, only what they returned"],
    ),
    (
        zoo.swallows_the_cancel,
        anything,
        {},
        [
            "a cancel was asked for",
            "told of the cancel",
            "let TaskCanceled and CancelledError pass",
        ],
    ),
    (
        zoo.swallows_the_cancel_async,
        anything,
        {},
        [
            "a cancel was asked for",
            "told of the cancel",
            "let TaskCanceled and CancelledError pass",
        ],
    ),
    (
        zoo.undoes_nothing,
        nothing_kept,
        {},
        [
            "a cancel was asked for",
            "still reserved: ['1a']",
            "nothing undid 'reserve'",
            "compensate=",
        ],
    ),
    (
        zoo.undoes_the_last_one_only,
        nothing_kept,
        {},
        ["'free-1a'", "look at the variable 'seat' when they run", "hand its value over"],
    ),
    (
        zoo.refunds_twice,
        not_twice_refunded,
        {},
        [
            "a cancel was asked for",
            "died after the compensation 'refund'",
            "compensation 'refund' runs again",
        ],
    ),
    (
        zoo.ignores_the_timeout,
        shipped_if_paid,
        {"signals": {"paid": {"by": "card"}}},
        ["no signal came, so 'payment' timed out", "nobody paid", "SignalTimeout of 'payment'"],
    ),
    (
        zoo.counts_a_signal_twice,
        approved_by_two,
        {"signals": {"approved": "ann"}},
        ["its signals sent, once more", "a signal came twice"],
    ),
    (
        zoo.waits_for_ever,
        anything,
        {},
        ["never ended", "waiting at 'the answer'", "timeout="],
    ),
    (
        zoo.looks_for_ever,
        anything,
        {},
        ["never ended", "'approved'", "time out and begin anew"],
    ),
    (
        zoo.has_one_attempt,
        succeeded,
        {},
        ["the task is dead", "max_attempts"],
    ),
    (
        zoo.has_little_time,
        succeeded,
        {},
        ["DeadlineExceeded", "the lease has to run out"],
    ),
    (
        zoo.catches_everything,
        anything,
        {},
        ["nothing: it is wrong undisturbed", "SuspensionSwallowed", "let BaseException pass"],
    ),
    (
        zoo.waits_for_two_at_once,
        anything,
        {},
        ["nothing: it is wrong undisturbed", "ConcurrentWait", "one wait follow the other"],
    ),
    (
        zoo.reserves_in_a_step,
        nothing_kept,
        {"only": "cancel@0 crash@0"},
        ["still reserved", "step 'reserve' had run", "register before"],
    ),
    (
        zoo.gives_back_what_may_come_late,
        nothing_kept,
        {"faults": ["zombie"]},
        ["still reserved", "'reserve' ran in a frozen process", "after the undoing"],
    ),
    (
        zoo.charges_in_a_plain_step,
        succeeded,
        {"faults": ["cancel"]},
        ["a canceled task does not succeed", 'outcome.status == "canceled"'],
    ),
]


@pytest.mark.parametrize(
    ("task", "check", "options", "words"), WRONG, ids=[case[0].__name__ for case in WRONG]
)
def test_a_wrong_handler_is_caught_and_told_why(
    scratch: str,
    task: Callable[..., Any],
    check: Callable[[Any, TaskView], Any],
    options: dict[str, Any],
    words: list[str],
) -> None:
    with pytest.raises(DoesNotSurvive) as refused:
        crash_anywhere(zoo.app, task, check=check, dsn=scratch, **{"world": fresh, **options})
    report = str(refused.value)
    for word in words:
        assert word in report, report
