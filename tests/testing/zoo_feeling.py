"""Handlers that are right on the real engine, and that notice when the engine is not."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import psycopg
from tables import bookings

from leasetask import App, AsyncContext, Attempt, Context, Done, NotDone, SignalTimeout, StepFailed
from leasetask.model import TaskView

app = App("postgresql://localhost/not-used")


class World:
    """Gives numbers that never come again, and keeps what it was asked to do."""

    def fresh(self) -> World:
        self.numbers = itertools.count(1)
        self.used: list[Any] = []
        self.starts: list[tuple[int, str]] = []
        self.charges: dict[str, int] = {}
        return self

    def number(self) -> int:
        return next(self.numbers)

    def charge(self, attempt: Attempt) -> str:
        """Charge once for each key, and write down who came with which number."""
        self.starts.append((attempt.number, attempt.token))
        self.charges.setdefault(attempt.key, attempt.number)
        return attempt.key

    def look(self, attempt: Attempt) -> Any:
        return Done(attempt.key) if attempt.key in self.charges else NotDone()


world = World()


def book(db: psycopg.Connection, what: str) -> str:
    db.execute("insert into booking values (%s)", [what])
    return what


@app.task
def keeps_numbers(ctx: Context) -> list[int]:
    """A recorded result never changes: what was used is what is returned."""
    one = ctx.step("one", world.number)
    ctx.step("use one", world.used.append, one)
    two = ctx.step("two", world.number)
    ctx.step("use two", world.used.append, two)
    return [one, two]


@app.task
async def keeps_numbers_of_branches(ctx: AsyncContext) -> list[int]:
    numbers = await asyncio.gather(ctx.step("one", world.number), ctx.step("two", world.number))
    await ctx.step("use", world.used.extend, numbers)
    return list(numbers)


def same_numbers(world: World, outcome: TaskView) -> None:
    assert outcome.status in ("succeeded", "canceled"), outcome.last_error
    if outcome.status == "succeeded":
        assert set(world.used) == set(outcome.result), f"used {world.used}, got {outcome.result}"


@app.task
def counts_its_starts(ctx: Context) -> str:
    """A start is committed before `do`: no two have the same number."""
    return ctx.effect("charge", world.charge, world.look)


def started_in_turn(world: World, outcome: TaskView) -> None:
    assert outcome.status in ("succeeded", "canceled"), outcome.last_error
    numbers = [number for number, _ in set(world.starts)]
    assert len(numbers) == len(set(numbers)), f"two starts with one number: {world.starts}"


@app.task
def books(ctx: Context) -> str:
    """A business write is there if and only if its checkpoint is."""
    ctx.transaction("one", book, "one")
    ctx.transaction("two", book, "two")
    return ctx.complete(book, "three")


def booked_once(dsn: str, outcome: TaskView) -> None:
    rows = bookings(dsn)
    assert len(rows) == len(set(rows)), rows
    expected = {*outcome.steps} | ({"three"} if outcome.status == "succeeded" else set())
    assert set(rows) == expected, f"{rows}, and recorded are {sorted(expected)}"


@app.task
def waits_twice(ctx: Context) -> list[Any]:
    """A signal is consumed once, and by whoever has it recorded."""
    got: list[Any] = []
    for number in (1, 2):
        try:
            got.append(ctx.wait_signal("paid", timeout=60, name=f"payment-{number}"))
        except SignalTimeout:
            got.append(None)
        ctx.step(f"note-{number}", world.used.append, got[-1])
    return got


def got_it_once(world: World, outcome: TaskView) -> None:
    assert outcome.status in ("succeeded", "canceled"), outcome.last_error
    if outcome.status == "succeeded":
        assert outcome.result == ["card", None], outcome.result
        assert set(world.used) == {"card", None}, world.used


@app.task
def naps(ctx: Context) -> int:
    """Waits cost no attempts, however many there are."""
    for number in range(7):
        ctx.sleep(60, name=f"nap-{number}")
    return 7


def napped(world: World, outcome: TaskView) -> None:
    assert outcome.status in ("succeeded", "canceled"), f"{outcome.status}: {outcome.last_error}"


@app.task
def passes_twice(ctx: Context) -> list[Any]:
    """A latch is open for everyone, until it is cleared."""
    return [ctx.wait_signal("open", timeout=60, name=f"gate-{n}") for n in (1, 2)]


def with_a_latch(dsn: str) -> str:
    app.signal("open", "yes", sticky=True)
    return dsn


def passed_twice(dsn: str, outcome: TaskView) -> None:
    assert outcome.status in ("succeeded", "canceled"), outcome.last_error
    assert outcome.result in (["yes", "yes"], None)


@app.task
def sends(ctx: Context) -> str:
    """A key names one task: with another input it is refused."""
    ctx.enqueue("first", receives, "a", key="letter")
    try:
        ctx.enqueue("second", receives, "b", key="letter")
    except StepFailed as refused:
        return str(refused.error["type"])
    return "both"


@app.task
def receives(ctx: Context, text: str) -> str:
    return text


def second_refused(world: World, outcome: TaskView) -> None:
    assert outcome.status in ("succeeded", "canceled"), outcome.last_error
    assert outcome.result in ("IdempotencyConflict", None)


@app.task
def books_a_page(ctx: Context) -> int:
    """As `books`; with its result the records outgrow the task's row and are kept beside it."""
    head = ctx.step("head", lambda: "head " * 240)
    return len(head + ctx.transaction("page", book, "page " * 240))


def page_once(dsn: str, outcome: TaskView) -> None:
    rows = len(bookings(dsn))
    assert rows == int("page" in outcome.steps), f"{rows} rows"


@app.task
def asks(ctx: Context) -> str:
    """A signal that a transaction sends is delivered after its commit, by whoever works."""
    ctx.enqueue("ask", answers, ctx.task_id)
    try:
        return str(ctx.wait_signal("answer", timeout=60))
    except SignalTimeout:
        return "no answer"


@app.task(priority=1)
def answers(ctx: Context, who: str) -> None:
    ctx.wait_for("the asker waits", lambda: app.get(who).status == "waiting", topic="-", every=1)
    ctx.transaction("answer", _answer)


def _answer(db: psycopg.Connection) -> None:
    app.signal("answer", "yes", conn=db)


def answered(world: World, outcome: TaskView) -> None:
    assert outcome.status == "succeeded", outcome.last_error
    assert outcome.result == "yes"
