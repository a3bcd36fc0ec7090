"""The zoo of right handlers: none is accused, whatever happens to its worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import zoo_right as zoo
from conftest import SOAK
from tables import with_table

from leasetask.testing import crash_anywhere
from leasetask.testing.server import Databases


@pytest.fixture(scope="module")
def scratch(leasetask_databases: Databases) -> Iterator[str]:
    """One database for all tests here: each run empties it."""
    with leasetask_databases.fresh() as dsn:
        yield dsn


PAIRS = 200 if SOAK else 4
# What is tried on a coroutine need not all be tried on its twin.
FEW: dict[str, Any] = {} if SOAK else {"faults": ["crash", "zombie"]}
PAID = {"paid": {"order": "o-1"}}

RIGHT = [
    (zoo.pays, zoo.world.fresh, zoo.paid_once, {"input": 5}),
    (zoo.pays_async, zoo.world.fresh, zoo.paid_once, {"input": 5}),
    (zoo.books, with_table, zoo.booked_once, {**FEW}),
    (zoo.books_async, with_table, zoo.booked_once, {}),
    (zoo.completes, with_table, zoo.completed_once, {**FEW}),
    (zoo.completes_async, with_table, zoo.completed_once, {}),
    (zoo.waits, zoo.world.fresh, zoo.shipped_if_paid, {**FEW, "signals": PAID}),
    (zoo.waits_async, zoo.world.fresh, zoo.shipped_if_paid, {"signals": PAID}),
    (zoo.looks, zoo.world.fresh, zoo.found_seven, {**FEW, "signals": {"approval": None}}),
    (zoo.looks_async, zoo.world.fresh, zoo.found_seven, {}),
    (zoo.sleeps, zoo.world.fresh, zoo.slept, {**FEW}),
    (zoo.sleeps_async, zoo.world.fresh, zoo.slept, {}),
    (zoo.reserves, zoo.world.fresh, zoo.all_or_nothing, {}),
    (zoo.reserves_async, zoo.world.fresh, zoo.all_or_nothing, {}),
    (zoo.fails_and_undoes, zoo.world.fresh, zoo.nothing_kept, {}),
    (zoo.copies, zoo.world.fresh, zoo.no_parts_left, {}),
    (zoo.copies_async, zoo.world.fresh, zoo.no_parts_left, {}),
    (zoo.gathers, zoo.world.fresh, zoo.paid_three, {}),
    (zoo.parent, zoo.world.fresh, zoo.one_child, {**FEW}),
    (zoo.parent_async, zoo.world.fresh, zoo.one_child, {}),
    (zoo.flaky, zoo.world.fresh, zoo.called_once, {}),
    (zoo.goes_another_way, zoo.world.fresh, zoo.called_once, {}),
]


@pytest.mark.parametrize(
    ("task", "world", "check", "options"), RIGHT, ids=[case[0].__name__ for case in RIGHT]
)
def test_a_right_handler_is_not_accused(
    scratch: str, task: Any, world: Any, check: Any, options: dict[str, Any]
) -> None:
    survived = crash_anywhere(
        zoo.app, task, world=world, check=check, pairs=PAIRS, seed=6, dsn=scratch, **options
    )
    assert survived.points >= 2
    assert survived.schedules["crash"] == survived.points
