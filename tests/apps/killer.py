"""One task that kills the process it runs in, and those claimed together with it."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from ledger import note

from leasetask import App, AsyncContext, Context

app = App()


@app.task
def killer(ctx: Context) -> None:
    note("killer")
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@app.task
async def bystander(ctx: AsyncContext, name: str) -> str:
    note(f"bystander {name}")
    await asyncio.sleep(0.05)
    return name
