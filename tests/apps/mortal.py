"""A worker whose heartbeat's thread dies once there is something to renew."""

from __future__ import annotations

import asyncio
from typing import Any

from leasetask import App, AsyncContext
from leasetask.heartbeat import Heartbeat

app = App()


def _die(self: Heartbeat, *args: Any) -> None:
    raise MemoryError("heartbeats cannot go on")


Heartbeat._renew = _die  # type: ignore[method-assign]  # nothing in the engine makes it die


@app.task
async def waits(ctx: AsyncContext) -> None:
    await asyncio.sleep(3600)
