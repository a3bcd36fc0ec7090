"""A handler with six steps, one of each common verb, as the speed of the harness is measured on."""

from __future__ import annotations

from typing import Any

import psycopg

from leasetask import App, Attempt, Context, Done, NotDone
from leasetask.model import TaskView

app = App("postgresql://localhost/not-used")


class Bank:
    """Takes idempotency keys."""

    charges: dict[str, int]

    def open(self) -> Bank:
        self.charges = {}
        return self

    def charge(self, attempt: Attempt) -> int:
        return self.charges.setdefault(attempt.key, 100)

    def look(self, attempt: Attempt) -> Any:
        return Done(self.charges[attempt.key]) if attempt.key in self.charges else NotDone()


bank = Bank()


@app.task
def six_steps(ctx: Context, order: int) -> int:
    price = ctx.step("price", lambda: order + 1)
    tax = ctx.step("tax", lambda: price + 1)
    paid = ctx.effect("charge", bank.charge, bank.look)
    ctx.step("label", lambda: tax)
    noted: int = ctx.transaction("note", note, paid)
    return ctx.step("total", lambda: noted + tax)


def note(db: psycopg.Connection, paid: int) -> int:
    row = db.execute("select %s", [paid]).fetchone()
    assert row is not None
    return int(row[0])


def paid_once(bank: Bank, outcome: TaskView) -> None:
    assert outcome.status in ("succeeded", "canceled")
    assert len(bank.charges) <= 1
    if outcome.status == "succeeded":
        assert (outcome.result, len(bank.charges)) == (103, 1)
