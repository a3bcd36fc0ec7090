"""The soak's handler: plain steps, a business write, an effect, a sleep, and an end with a write.

It notes in the ledger, outside the engine, when a body begins and when a step is known as recorded.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request

import psycopg
from ledger import note

from leasetask import App, Attempt, Context, Done, NotDone, Retry

app = App()
OUTSIDE = os.environ.get("TORRENTS", "")


def _ask(method: str, path: str) -> object:
    request = urllib.request.Request(f"{OUTSIDE}{path}", method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def _body(number: int, step: str) -> int:
    note(f"body {number} {step}")
    time.sleep(0.08)  # the work, long enough to be killed in
    return number


def _book(db: psycopg.Connection, number: int, what: str) -> None:
    db.execute("insert into business (number, what) values (%s, %s)", [number, what])


@app.task(retry=Retry(max_attempts=50, initial=0.02, max_delay=0.3))
def order(ctx: Context, number: int) -> None:
    """Number n of the load."""
    note(f"begin {number}")
    ctx.step("first", _body, number, "first")
    note(f"recorded {number} first")
    ctx.transaction("book", _book, number, "booked")
    ctx.effect("send", lambda attempt: _send(number, attempt), lambda attempt: _sent(number))
    if number % 4 == 0:
        ctx.sleep(0.05)
    ctx.step("last", _body, number, "last")
    note(f"recorded {number} last")
    return ctx.complete(_book, number, "ended")


def _send(number: int, attempt: Attempt) -> str:
    note(f"do {number}")
    name = str(_ask("POST", f"/add?name=n{number}"))
    note(f"done {number}")
    return name


def _sent(number: int) -> Done[str] | NotDone:
    listed = _ask("GET", f"/has?name=n{number}")
    return Done(f"n{number}") if listed else NotDone()
