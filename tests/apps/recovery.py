"""Handlers whose worker is killed, frozen or held up while they run."""

from __future__ import annotations

import asyncio
import ctypes
import time

from ledger import hold, note

from leasetask import App, AsyncContext, Context, LeaseLost

app = App()


def _work(number: int) -> int:
    note(f"step {number}")
    return number


@app.task
def five(ctx: Context) -> int:
    """Five steps; the first run stands still after the third."""
    total = sum(ctx.step(f"step-{n}", _work, n) for n in (1, 2, 3))
    if ctx.run == 1:
        note("stands after step 3")
        hold("never")
    return total + sum(ctx.step(f"step-{n}", _work, n) for n in (4, 5))


@app.task
async def five_async(ctx: AsyncContext) -> int:
    total = 0
    for n in (1, 2, 3):
        total += await ctx.step(f"step-{n}", _work, n)
    if ctx.run == 1:
        note("stands after step 3")
        await asyncio.sleep(3600)
    for n in (4, 5):
        total += await ctx.step(f"step-{n}", _work, n)
    return total


# --- frozen past the lease -------------------------------------------------------------------


def _held(where: str, run: int) -> str:
    note(f"{where}: run {run}")
    if run == 1:
        hold("thaw")
    return f"run {run}"


@app.task
def frozen_in_step(ctx: Context) -> str:
    try:
        return ctx.step("only", _held, "in a step", ctx.run)
    except LeaseLost:
        note("in a step: told of the loss")
        raise


@app.task
def frozen_between(ctx: Context) -> str:
    _held("between", ctx.run)
    try:
        ctx.check()
        ctx.step("after", note, "between: a step after the loss" if ctx.run == 1 else "between: ok")
    except LeaseLost:
        note("between: told of the loss")
        raise
    return f"run {ctx.run}"


@app.task
def frozen_at_end(ctx: Context) -> str:
    return _held("at the end", ctx.run)


@app.task
async def frozen_async(ctx: AsyncContext) -> str:
    note(f"async: run {ctx.run}")
    if ctx.run == 1:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            note("async: told of the loss")
            raise
    return f"run {ctx.run}"


@app.task
def outlived(ctx: Context, seconds: float) -> str:
    """The first run ends only once the second, in the same process, has begun."""
    note(f"run {ctx.run} begins")
    if ctx.run == 1:
        hold("second")
    else:
        time.sleep(seconds)
    note(f"run {ctx.run} ends")
    return f"run {ctx.run}"


@app.task
def stuck_once(ctx: Context) -> str:
    """The first run never ends, whatever it is told."""
    note(f"run {ctx.run} stands")
    if ctx.run == 1:
        hold("never")
    return f"run {ctx.run}"


# --- longer than the lease ---------------------------------------------------------------------


@app.task
def sleeps(ctx: Context, seconds: float) -> str:
    note("begins")
    time.sleep(seconds)
    note("ends")
    return "slept"


@app.task
async def blocks_the_loop(ctx: AsyncContext, seconds: float) -> str:
    note("begins")
    time.sleep(seconds)
    note("ends")
    return "blocked"


@app.task
async def spins(ctx: AsyncContext, seconds: float) -> str:
    note("begins")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
    note("ends")
    return "spun"


@app.task
def holds_the_gil(ctx: Context, seconds: int) -> str:
    """A C call that does not release the interpreter's lock; the second run is quick."""
    note(f"run {ctx.run} begins")
    if ctx.run == 1:
        ctypes.PyDLL(None).sleep(seconds)
    note(f"run {ctx.run} ends")
    return f"run {ctx.run}"


@app.task(lease=0.5)
def short_lease(ctx: Context, seconds: float) -> str:
    """A kind whose lease is shorter than its worker's."""
    note("begins")
    time.sleep(seconds)
    note("ends")
    return "slept"


# --- one step after the other --------------------------------------------------------------------


@app.task
def walk(ctx: Context, number: int) -> list[int]:
    """Steps, a sleep and a signal; each body notes that it ran."""
    steps = [ctx.step(f"step-{n}", _walk, number, n) for n in (0, 1)]
    ctx.sleep(0.05)
    steps.append(ctx.wait_signal(f"walk-{number}"))
    return steps + [ctx.step(f"step-{n}", _walk, number, n) for n in (3, 4)]


def _walk(number: int, step: int) -> int:
    note(f"walk {number}: {step}")
    time.sleep(0.01)
    return step


@app.task
async def walk_async(ctx: AsyncContext, number: int) -> list[int]:
    """The same, two steps at a time."""
    first = await asyncio.gather(*(ctx.step(f"step-{n}", _walk_async, number, n) for n in (0, 1)))
    await ctx.sleep(0.05)
    signal = await ctx.wait_signal(f"walk-{number}")
    last = await asyncio.gather(*(ctx.step(f"step-{n}", _walk_async, number, n) for n in (3, 4)))
    return [*first, signal, *last]


async def _walk_async(number: int, step: int) -> int:
    note(f"walk {number}: {step}")
    await asyncio.sleep(0.01)
    return step
