"""Handlers that are wrong, each in a way that people really write."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress
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
    TaskCanceled,
    Unknown,
)
from leasetask.model import TaskView

app = App("postgresql://localhost/not-used")


@dataclass
class World:
    """An outside that takes no idempotency keys, as many do not."""

    charges: list[str] = field(default_factory=list)
    reserved: set[str] = field(default_factory=set)
    mails: list[str] = field(default_factory=list)

    def charge(self, what: str = "order") -> str:
        self.charges.append(what)
        return what

    def charged(self, attempt: Attempt) -> Any:
        return Done(self.charges[0]) if self.charges else NotDone()

    def fresh(self) -> World:
        vars(self).update(vars(World()))
        return self


world = World()


# --- checks ----------------------------------------------------------------------------------------


def charged_once(world: World, outcome: TaskView) -> None:
    assert outcome.status in ("succeeded", "canceled"), outcome.last_error
    if outcome.status == "succeeded":
        assert len(world.charges) == 1, f"{len(world.charges)} charges"
    assert len(world.charges) <= 1, f"{len(world.charges)} charges"


def mailed_once(world: World, outcome: TaskView) -> None:
    assert outcome.status in ("succeeded", "canceled")
    assert len(world.mails) == (outcome.status == "succeeded"), world.mails


def booked_once(dsn: str, outcome: TaskView) -> None:
    rows = len(bookings(dsn))
    assert rows <= 1, f"{rows} rows"


def nothing_kept(world: World, outcome: TaskView) -> None:
    if outcome.status != "succeeded":
        assert not world.reserved, f"still reserved: {sorted(world.reserved)}"


def anything(world: World, outcome: TaskView) -> None:
    pass


# --- side effects in the wrong place -----------------------------------------------------------------


@app.task
def charges_outside_a_step(ctx: Context) -> None:
    order = ctx.step("order", lambda: "order")
    world.charge(order)
    ctx.step("mail", lambda: None)


@app.task
def charges_in_a_plain_step(ctx: Context) -> None:
    ctx.step("charge", world.charge)
    ctx.step("mail", lambda: None)


@app.task
async def charges_beside_a_harmless_branch(ctx: AsyncContext) -> None:
    async def harmless() -> str:
        await asyncio.sleep(0)
        return "."

    await asyncio.gather(
        ctx.step("look", harmless), ctx.step("charge", world.charge), ctx.step("see", harmless)
    )


@app.task
def charges_in_a_transaction(ctx: Context) -> None:
    def mark(db: psycopg.Connection) -> None:
        db.execute("select 1")
        world.charge()

    ctx.transaction("mark", mark)


@app.task
def charges_in_a_check(ctx: Context) -> None:
    def look() -> bool:
        world.charge()
        return len(world.charges) > 0

    ctx.wait_for("approved", look, topic="approval", every=60)


@app.task
def books_outside_a_transaction(ctx: Context) -> None:
    def book() -> None:
        with psycopg.connect(app.dsn) as db:
            db.execute("insert into booking values ('seat 1a')")

    ctx.step("book", book)


@app.task
def mails_after_complete(ctx: Context) -> None:
    ctx.complete(lambda db: db.execute("select 1") and None)
    world.mails.append("booked")


# --- effects ---------------------------------------------------------------------------------------


@app.task
def says_not_done(ctx: Context) -> None:
    ctx.effect("charge", lambda a: world.charge(), lambda a: NotDone())


@app.task
def says_done(ctx: Context) -> None:
    ctx.effect("charge", lambda a: world.charge(), lambda a: Done("order"))


@app.task
def cannot_tell(ctx: Context) -> None:
    ctx.effect("charge", lambda a: world.charge(), lambda a: Unknown("no API for that"))


@app.task
def hands_no_key(ctx: Context) -> None:
    ctx.effect("charge", lambda a: world.charge(), world.charged)


# --- replays ---------------------------------------------------------------------------------------


@app.task
def uses_a_name_twice(ctx: Context) -> None:
    for file in ("a", "b"):
        ctx.step("copy", world.charge, file)


@app.task
def depends_on_the_time(ctx: Context) -> None:
    ctx.step("report", world.mails.append, f"at {time.time()}")
    ctx.step("mail", lambda: None)


@app.task
def branches_at_random(ctx: Context) -> None:
    if random.random() < 0.5:
        ctx.step("by card", lambda: None)
    else:
        ctx.step("by invoice", lambda: None)
    ctx.step("mail", lambda: None)


@app.task
def branches_on_the_outside(ctx: Context) -> None:
    if not world.charges:
        ctx.step("charge", world.charge)
    ctx.step("mail", lambda: None)


@app.task(retry=Retry(max_attempts=5, initial=0.01))
def leaves_its_result_in_memory(ctx: Context) -> str:
    found: dict[str, str] = {}

    def look() -> None:
        found["address"] = "Main Street 1"

    ctx.step("look", look)
    ctx.step("mail", lambda: None)
    return found["address"]


# --- cancels and waits -----------------------------------------------------------------------------


@app.task
def swallows_the_cancel(ctx: Context) -> str:
    for number in range(2):
        try:
            ctx.step(f"copy-{number}", lambda: None)
        except Exception:
            return "partly"
    return "all"


@app.task
async def swallows_the_cancel_async(ctx: AsyncContext) -> str:
    for number in range(2):
        try:
            await ctx.step(f"copy-{number}", asyncio.sleep, 0)
        except (TaskCanceled, asyncio.CancelledError):
            return "partly"
    return "all"


@app.task
def undoes_nothing(ctx: Context) -> None:
    ctx.step("reserve", world.reserved.add, "1a")
    ctx.step("ticket", lambda: None)


@app.task
def undoes_the_last_one_only(ctx: Context) -> None:
    for seat in ("1a", "1b", "1c"):
        ctx.compensate(f"free-{seat}", lambda: world.reserved.discard(seat))
        ctx.step(f"reserve-{seat}", world.reserved.add, seat)
    ctx.step("ticket", lambda: None)


@app.task
def refunds_twice(ctx: Context) -> None:
    ctx.compensate("refund", world.mails.append, "refund")
    ctx.step("reserve", lambda: None)


@app.task
def ignores_the_timeout(ctx: Context) -> Any:
    paid = None
    with suppress(SignalTimeout):
        paid = ctx.wait_signal("paid", timeout=3600, name="payment")
    ctx.step("ship", world.mails.append, "parcel")
    return paid


@app.task
def counts_a_signal_twice(ctx: Context) -> None:
    first = ctx.wait_signal("approved", timeout=3600)
    second = None
    try:
        second = ctx.wait_signal("approved", timeout=3600)
    except SignalTimeout:
        return
    ctx.step("approve", world.mails.append, f"{first} and {second}")


@app.task
def waits_for_ever(ctx: Context) -> None:
    ctx.step("ask", lambda: None)
    ctx.wait_signal("answer", name="the answer")


@app.task
def looks_for_ever(ctx: Context) -> None:
    ctx.wait_for("approved", lambda: world.charges or None, topic="approval", every=60)


@app.task(retry=Retry(max_attempts=1))
def has_one_attempt(ctx: Context) -> None:
    ctx.step("charge", lambda: None)


@app.task(deadline=20)
def has_little_time(ctx: Context) -> None:
    ctx.step("charge", lambda: None)


@app.task
def catches_everything(ctx: Context) -> str:
    try:
        ctx.wait_signal("paid", timeout=60)
    except BaseException:  # the suspension too
        return "not paid"
    return "paid"


@app.task
async def waits_for_two_at_once(ctx: AsyncContext) -> None:
    await asyncio.gather(
        ctx.wait_signal("paid", name="payment"), ctx.wait_signal("packed", name="parcel")
    )


@app.task
def reserves_in_a_step(ctx: Context) -> None:
    ctx.step("reserve", world.reserved.add, "1a", compensate=lambda _: world.reserved.clear())
    ctx.step("ticket", lambda: None)


@app.task(retry=Retry(max_attempts=3, initial=0.01))
def gives_back_what_may_come_late(ctx: Context) -> None:
    ctx.compensate("free", world.reserved.clear)
    ctx.step("reserve", world.reserved.add, "1a")
    raise NonRetryable("no money")


def succeeded(world: Any, outcome: TaskView) -> None:
    assert outcome.status == "succeeded"


def not_twice_refunded(world: World, outcome: TaskView) -> None:
    assert len(world.mails) <= 1, world.mails


def shipped_if_paid(world: World, outcome: TaskView) -> None:
    if outcome.status == "succeeded" and world.mails:
        assert outcome.result is not None, "shipped, and nobody paid"


def approved_by_two(world: World, outcome: TaskView) -> None:
    assert not any(mail == "ann and ann" for mail in world.mails), world.mails
