"""Handlers that are right: whatever happens to their worker, the world ends as it should."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import psycopg
from tables import bookings

from leasetask import (
    App,
    AsyncContext,
    Attempt,
    Context,
    Done,
    NonRetryable,
    NotDone,
    Retry,
    SignalTimeout,
    StepFailed,
    TaskCanceled,
)
from leasetask.model import TaskView

app = App("postgresql://localhost/not-used")

SOON = Retry(max_attempts=5, initial=0.1, jitter=0)


@dataclass
class World:
    """An outside that takes idempotency keys, and refuses what comes too late."""

    charges: dict[str, int] = field(default_factory=dict)
    reserved: set[str] = field(default_factory=set)
    closed: set[str] = field(default_factory=set)
    mails: set[str] = field(default_factory=set)
    tries: Counter[str] = field(default_factory=Counter)

    def charge(self, key: str, amount: int) -> str:
        self.charges.setdefault(key, amount)
        return key

    def charged(self, attempt: Attempt) -> Any:
        return Done(attempt.key) if attempt.key in self.charges else NotDone()

    def reserve(self, what: str, token: str = "") -> str:
        """A worker that was frozen may come after its reservation was given back."""
        if self.closed & {what, token}:
            raise NonRetryable("too late")
        self.reserved.add(what)
        return what

    def free(self, what: str) -> None:
        self.closed.add(what)
        self.reserved.discard(what)

    def look_for(self, what: str, attempt: Attempt) -> Any:
        """Who says that it has not happened has to see to it that it will not."""
        if what in self.reserved:
            return Done(what)
        self.closed.add(attempt.token)
        return NotDone()

    def fresh(self) -> World:
        vars(self).update(vars(World()))
        return self


world = World()


def ended(outcome: TaskView) -> bool:
    """It succeeded; or else it was canceled, and the rest of the check is off."""
    assert outcome.status in ("succeeded", "canceled"), outcome.last_error
    return outcome.status == "succeeded"


# --- effects -------------------------------------------------------------------------------------


@app.task
def pays(ctx: Context, amount: int) -> str:
    key = ctx.effect("charge", lambda a: world.charge(a.key, amount), world.charged)
    ctx.step("mail", world.mails.add, key)
    return key


@app.task
async def pays_async(ctx: AsyncContext, amount: int) -> str:
    async def charge(attempt: Attempt) -> str:
        await asyncio.sleep(0)
        return world.charge(attempt.key, amount)

    key: str = await ctx.effect("charge", charge, world.charged)
    await ctx.step("mail", world.mails.add, key)
    return key


def paid_once(world: World, outcome: TaskView) -> None:
    assert len(world.charges) <= 1
    if ended(outcome):
        assert world.mails == set(world.charges) == {outcome.result}


# --- business writes -------------------------------------------------------------------------------


def book(db: psycopg.Connection, what: str) -> str:
    db.execute("insert into booking values (%s)", [what])
    return what


async def book_async(db: psycopg.AsyncConnection, what: str) -> str:
    await db.execute("insert into booking values (%s)", [what])
    return what


@app.task
def books(ctx: Context) -> str:
    ctx.transaction("one", book, "one")
    ctx.transaction("two", book, "two", isolation="serializable")
    return ctx.step("name", lambda: "booked")


@app.task
async def books_async(ctx: AsyncContext) -> str:
    await ctx.transaction("one", book_async, "one")
    await ctx.transaction("two", book_async, "two", isolation="repeatable read")
    name: str = await ctx.step("name", lambda: "booked")
    return name


def booked_once(dsn: str, outcome: TaskView) -> None:
    rows = bookings(dsn)
    assert rows == sorted(set(rows))
    if ended(outcome):
        assert rows == ["one", "two"]


@app.task
def completes(ctx: Context) -> str:
    name = ctx.step("name", lambda: "one")
    return ctx.complete(book, name)


@app.task
async def completes_async(ctx: AsyncContext) -> str:
    name = await ctx.step("name", lambda: "one")
    done: str = await ctx.complete(book_async, name)
    return done


def completed_once(dsn: str, outcome: TaskView) -> None:
    assert bookings(dsn) == (["one"] if ended(outcome) else [])


# --- waits -----------------------------------------------------------------------------------------


@app.task
def waits(ctx: Context) -> str:
    try:
        paid = ctx.wait_signal("paid", timeout=3600)
    except SignalTimeout:
        return "not paid"
    ctx.step("ship", world.mails.add, paid["order"])
    return "shipped"


@app.task
async def waits_async(ctx: AsyncContext) -> str:
    try:
        paid = await ctx.wait_signal("paid", timeout=3600)
    except SignalTimeout:
        return "not paid"
    await ctx.step("ship", world.mails.add, paid["order"])
    return "shipped"


def shipped_if_paid(world: World, outcome: TaskView) -> None:
    if ended(outcome):
        assert bool(world.mails) == (outcome.result == "shipped")


@app.task
def looks(ctx: Context) -> int:
    def look() -> int | None:
        world.tries["looked"] += 1
        return 7 if world.tries["looked"] >= 3 else None

    return ctx.wait_for("approved", look, topic="approval", every=60)


@app.task
async def looks_async(ctx: AsyncContext) -> int:
    async def look() -> int | None:
        world.tries["looked"] += 1
        return 7 if world.tries["looked"] >= 3 else None

    found: int = await ctx.wait_for("approved", look, topic="approval", every=60)
    return found


def found_seven(world: World, outcome: TaskView) -> None:
    if ended(outcome):
        assert outcome.result == 7


@app.task
def sleeps(ctx: Context) -> str:
    before = ctx.step("before", lambda: "a")
    ctx.sleep(365 * 86400)
    ctx.sleep(1.0, name="a moment")
    return before + ctx.step("after", lambda: "b")


@app.task
async def sleeps_async(ctx: AsyncContext) -> str:
    before: str = await ctx.step("before", lambda: "a")
    await ctx.sleep(365 * 86400)
    return before + str(await ctx.step("after", lambda: "b"))


def slept(world: World, outcome: TaskView) -> None:
    if ended(outcome):
        assert outcome.result == "ab"


# --- cancel ----------------------------------------------------------------------------------------


@app.task
def reserves(ctx: Context) -> None:
    for seat in ("1a", "1b"):
        ctx.effect(
            f"reserve-{seat}",
            lambda a, seat=seat: world.reserve(seat, a.token),
            lambda a, seat=seat: world.look_for(seat, a),
            compensate=world.free,
        )
    ctx.step("ticket", world.mails.add, "ticket")


@app.task
async def reserves_async(ctx: AsyncContext) -> None:
    for seat in ("1a", "1b"):
        await ctx.compensate(f"free-{seat}", world.free, seat)
        await ctx.step(f"reserve-{seat}", world.reserve, seat)
    await ctx.step("ticket", world.mails.add, "ticket")


def all_or_nothing(world: World, outcome: TaskView) -> None:
    whole = ended(outcome)
    assert world.reserved == ({"1a", "1b"} if whole else set())
    assert not whole or world.mails == {"ticket"}


@app.task(retry=SOON)
def fails_and_undoes(ctx: Context) -> None:
    ctx.compensate("free", world.free, "1a")
    ctx.step("reserve", world.reserve, "1a")
    ctx.step("pay", _declined)


def _declined() -> None:
    raise NonRetryable("no money")


def nothing_kept(world: World, outcome: TaskView) -> None:
    assert outcome.status in ("failed", "canceled")
    assert not world.reserved


@app.task
def copies(ctx: Context) -> str:
    def copy() -> str:
        world.reserved.add("part")
        try:
            for _ in range(3):
                ctx.check()
        finally:
            world.reserved.discard("part")
        world.mails.add("copy")
        return "copy"

    try:
        return ctx.step("copy", copy)
    except TaskCanceled:
        world.tries["cleaned"] += 1
        raise


@app.task
async def copies_async(ctx: AsyncContext) -> str:
    async def copy() -> str:
        world.reserved.add("part")
        try:
            for _ in range(3):
                await asyncio.sleep(0)
        finally:
            world.reserved.discard("part")
        world.mails.add("copy")
        return "copy"

    copied: str = await ctx.step("copy", copy)
    return copied


def no_parts_left(world: World, outcome: TaskView) -> None:
    assert not world.reserved
    if ended(outcome):
        assert world.mails == {"copy"}


# --- branches, children, failures --------------------------------------------------------------------


@app.task
async def gathers(ctx: AsyncContext) -> list[str]:
    async def pay(name: str) -> str:
        key: str = await ctx.effect(name, lambda a: world.charge(a.key, 1), world.charged)
        return str(await ctx.step(f"mail {name}", _mail, key))

    return list(await asyncio.gather(pay("a"), pay("b"), pay("c")))


async def _mail(key: str) -> str:
    await asyncio.sleep(0.001)
    world.mails.add(key)
    return key


def paid_three(world: World, outcome: TaskView) -> None:
    assert len(world.charges) <= 3
    if ended(outcome):
        assert sorted(outcome.result) == sorted(world.mails) == sorted(world.charges)


@app.task
def parent(ctx: Context) -> str:
    return ctx.enqueue("send", child, "hello")


@app.task
async def parent_async(ctx: AsyncContext) -> str:
    return await ctx.enqueue("send", child, "hello")


@app.task
def child(ctx: Context, text: str) -> None:
    ctx.effect("post", lambda a: world.charge(a.key, 1), world.charged, retry=SOON)
    ctx.step("mail", world.mails.add, text)


def one_child(world: World, outcome: TaskView) -> None:
    assert len(world.charges) <= 1
    if ended(outcome):
        assert world.mails == {"hello"}


@app.task(retry=SOON)
def flaky(ctx: Context) -> str:
    def call(attempt: Attempt) -> str:
        world.tries["called"] += 1
        if world.tries["called"] < 3:
            raise ConnectionError("reset by peer")
        return world.charge(attempt.key, 1)

    return ctx.effect("call", call, world.charged)


@app.task(retry=SOON)
async def goes_another_way(ctx: AsyncContext) -> str:
    try:
        await ctx.step("cheap", _declined)
    except StepFailed:
        return str(await ctx.step("dear", world.charge, "dear", 2))
    return "cheap"


def called_once(world: World, outcome: TaskView) -> None:
    if ended(outcome):
        assert list(world.charges) == [outcome.result]
