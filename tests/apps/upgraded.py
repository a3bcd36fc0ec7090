"""A handler in two releases: the second puts a step in between, and adds one at the end."""

from __future__ import annotations

import os

import psycopg
from ledger import note

from leasetask import App, Context

app = App()
RELEASE = int(os.environ["RELEASE"])


def book(db: psycopg.Connection, number: int, what: str) -> None:
    db.execute("insert into business (number, what) values (%s, %s)", [number, what])


@app.task(version=RELEASE, accepts=(1,) if RELEASE == 2 else ())
def order(ctx: Context, number: int) -> int:
    ctx.step("reserve", note, f"reserve {number}")
    ctx.transaction("book", book, number, "booked")
    if RELEASE == 2:
        ctx.step("check", note, f"check {number}", inserted=True)
    ctx.wait_signal(f"paid:{number}")
    ctx.transaction("ship", book, number, "shipped")
    if RELEASE == 2:
        ctx.step("thank", note, f"thank {number}")
    return RELEASE
