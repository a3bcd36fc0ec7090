"""Handlers that run while the database, the network or the clock fails."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from ledger import hold, note

from leasetask import App, AsyncContext, Context, LeaseLost

app = App()


@app.task
async def quick(ctx: AsyncContext, number: int) -> int:
    note(f"quick {number}")
    return number


@app.task
def steps(ctx: Context, number: int) -> int:
    """Three steps, each noted when its body runs."""
    for step in range(3):
        ctx.step(f"step-{step}", note, f"step {number} {step}")
    return number


@app.task
def finishes(ctx: Context) -> str:
    """Has its result when the test says so."""
    note("finishes: begins")
    hold("go")
    note("finishes: has its result")
    return "kept"


@app.task
async def lasts(ctx: AsyncContext) -> None:
    """Goes on until the test says so; awaiting, since under libfaketime time.sleep() raises EINVAL."""
    note("lasts: begins")
    while not Path(f"{os.environ['LEDGER']}.go").exists():
        await asyncio.sleep(0.01)


@app.task
async def watches(ctx: AsyncContext) -> int:
    """Goes on until it is told that its lease is lost; its second run ends at once."""
    note(f"watches: run {ctx.run}")
    try:
        while ctx.run == 1:
            ctx.check()
            await asyncio.sleep(0.01)
    except (LeaseLost, asyncio.CancelledError):
        note("watches: told of the loss")
        raise
    return ctx.run
