"""Handlers in the way of a worker that was told to stop."""

from __future__ import annotations

import asyncio
import time

from ledger import hold, note

from leasetask import App, AsyncContext, Context

app = App()


@app.task
async def brief(ctx: AsyncContext) -> None:
    """Work that is under way whenever the signal comes."""
    await ctx.step("one", asyncio.sleep, 0.01)
    await ctx.step("two", asyncio.sleep, 0.01)


@app.task
def finishes(ctx: Context, seconds: float) -> str:
    note("finishes: begins")
    time.sleep(seconds)
    return "finished"


@app.task
def walks(ctx: Context) -> None:
    """Steps without end: unwound at one of them."""
    note("walks: begins")
    for number in range(100_000):
        ctx.step(f"step-{number}", time.sleep, 0.02)


@app.task
async def awaits(ctx: AsyncContext) -> None:
    note("awaits: begins")
    await asyncio.sleep(3600)


@app.task
def in_thread(ctx: Context) -> None:
    """A thread that cannot be stopped."""
    note("in_thread: begins")
    hold("never")


@app.task
async def in_executor(ctx: AsyncContext) -> None:
    """An async handler that awaits a thread which cannot be stopped."""
    note("in_executor: begins")
    await asyncio.to_thread(hold, "never")


@app.task
async def refuses(ctx: AsyncContext) -> None:
    """Cancelled, it goes on."""
    note("refuses: begins")
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            note("refuses: told")
