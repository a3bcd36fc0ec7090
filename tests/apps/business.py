"""Handlers with a business table and an outside that counts; their workers are killed at every point."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request

import psycopg

from leasetask import App, Attempt, Context, Done, NotDone, Retry, Unknown

app = App()
TORRENTS = os.environ.get("TORRENTS", "")
KILL_AFTER = float(os.environ.get("KILL_AFTER", "0"))
"""Seconds from the first run to the process's end; 0: it lives."""

_armed = threading.Lock()


def arm() -> None:
    """Let this process die, once it works, at a moment that nobody knows."""
    if KILL_AFTER and _armed.acquire(blocking=False):
        threading.Timer(KILL_AFTER, os.kill, (os.getpid(), signal.SIGKILL)).start()


def mark(db: psycopg.Connection, order: int, what: str) -> str:
    db.execute("insert into business values (%s, %s)", [order, what])
    return what


@app.task(retry=Retry(max_attempts=20, initial=0.01, max_delay=0.1))
def pay(ctx: Context, order: int) -> str:
    arm()
    for what in ("reserved", "paid"):
        ctx.transaction(what, mark, order, what)
    return ctx.complete(mark, order, "shipped")


def ask(method: str, path: str) -> object:
    request = urllib.request.Request(f"{TORRENTS}{path}", method=method)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


@app.task(retry=Retry(max_attempts=20, initial=0.01, max_delay=0.1))
def download(ctx: Context, name: str) -> str:
    arm()

    def add(attempt: Attempt) -> str:
        note("do", attempt)
        return str(ask("POST", f"/add?name={name}"))

    def look(attempt: Attempt) -> Done[str] | NotDone:
        note("reconcile", attempt)
        return Done(name) if name in ask("GET", "/list") else NotDone()

    def note(what: str, attempt: Attempt) -> None:
        with open(os.environ["LEDGER"], "ab", buffering=0) as ledger:  # noqa: PTH123  # O_APPEND, unbuffered
            ledger.write(f"{what} {name} {attempt.number}\n".encode())

    added = ctx.effect("add", add, look)
    return ctx.step("verify", lambda: added)


@app.task(retry=Retry(max_attempts=20, initial=0.01, max_delay=0.1))
def unclear(ctx: Context, name: str) -> str:
    def add(attempt: Attempt) -> str:
        if attempt.number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return str(ask("POST", f"/add?name={name}"))

    return ctx.effect("add", add, lambda attempt: Unknown("the client has no list"))
