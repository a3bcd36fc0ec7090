"""A handler that is frozen inside its business transaction, with a business row locked."""

from __future__ import annotations

import os

import psycopg
from ledger import hold, note

from leasetask import App, Context, Retry

app = App()


def book(db: psycopg.Connection, who: str) -> str:
    db.execute("update account set balance = balance - 1, by = %s", [who])
    note(f"booked by {who}")
    if not os.path.exists(f"{os.environ['LEDGER']}.second"):  # noqa: PTH110  # one system call
        hold("go")
    return who


@app.task(retry=Retry(max_attempts=5, initial=0.05))
def pay(ctx: Context) -> str:
    return ctx.transaction("book", book, str(os.getpid()), isolation=os.environ["ISOLATION"])
