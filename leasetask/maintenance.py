"""What workers do now and then beside running tasks: deliver, sweep, declare, prune, suspects."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from leasetask import protocol
from leasetask.connection import is_disconnect, is_transient
from leasetask.link import Link, pause_until
from leasetask.model import Swept
from leasetask.protocol import KindPolicy, Query

logger = logging.getLogger("leasetask")

DELIVER_EVERY = 1.0
DECLARE_EVERY = 60.0
SUSPECTS_EVERY = 5.0
PRUNE_EVERY = 600.0
"""Seconds between these chores; suspects that this worker's own sweep finds are seen to at once."""

PRUNE_BATCH = 1000
_PRUNE_AGAIN = 0.5
"""Seconds between the batches of one pruning: it must be felt by nobody."""

UNCONSUMED = 3.0
"""Signals that nobody has consumed are kept this many times as long as finished tasks."""

SWEEP_BATCH = 1000
_BUSY_AGAIN = 0.05
"""Seconds before a topic whose rows somebody held is tried again."""


class Maintenance:
    """The chores of one worker, each on its own timer, over one connection."""

    def __init__(
        self,
        link: Link,
        lease: float,
        policies: Iterable[KindPolicy],
        *,
        sweeps: bool,
        retention: float | None,
        on_suspects: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self._link = link
        self._policies = list(policies)
        self._pairs = [(p.kind, p.version) for p in self._policies]
        self._sweep_every = min(1.5, lease / 2)
        self._sweeps = sweeps
        self._retention = retention
        self._on_suspects = on_suspects
        self._topics: set[str] = set()
        self._wake = asyncio.Event()
        self._look = True
        self._suspected = False

    def deliver_soon(self, topic: str) -> None:
        """A suspension on this topic has committed: its signal may be there already."""
        self._topics.add(topic)
        self._wake.set()

    def look_soon(self) -> None:
        """A signal was notified."""
        self._look = True
        self._wake.set()

    async def serve(self) -> None:
        """Do the chores, for ever."""
        due = dict.fromkeys(("look", "sweep", "suspects", "declare", "prune"), 0.0)
        if not self._sweeps:
            due["sweep"] = due["prune"] = float("inf")
        while True:
            now = time.monotonic()
            try:
                if self._policies and now >= due["declare"]:
                    await self._link.ask(protocol.declare_kinds(self._policies))
                    due["declare"] = now + DECLARE_EVERY
                if self._look or now >= due["look"]:
                    self._look = False
                    due["look"] = now + DELIVER_EVERY
                    topics = [row[0] for row in await self._link.ask(protocol.UNDELIVERED)]
                    self._look = len(topics) >= protocol.MOST_TOPICS  # there may be more
                    self._topics.update(topics)
                again = await self._deliver()
                if now >= due["sweep"]:
                    # Behind a snapshot that is held open a sweep walks dead entries: bound its share.
                    cost = await self._sweep()
                    due["sweep"] = now + max(self._sweep_every, 4 * cost)
                if self._suspected or now >= due["suspects"]:
                    self._suspected = False
                    due["suspects"] = now + SUSPECTS_EVERY
                    await self._look_for_suspects()
                if now >= due["prune"]:
                    due["prune"] = now + await self._prune()
            except Exception as error:
                if not (is_disconnect(error) or is_transient(error)):
                    raise
                again = True
            pause = now if self._look else min(due["look"], due["sweep"], due["prune"])
            await self._sleep(_BUSY_AGAIN if again else pause - time.monotonic())

    async def _sleep(self, seconds: float) -> None:
        if await pause_until(self._wake, seconds):
            self._wake.clear()

    async def _deliver(self) -> bool:
        """Deliver the topics at hand; tell whether some have to be asked again."""
        topics, self._topics = self._topics, set()
        if not topics:
            return False
        rows = await self._link.ask(protocol.deliver(sorted(topics)))
        self._topics.update(topic for topic, _, again in rows if again)
        return bool(self._topics)

    async def _sweep(self) -> float:
        began = time.monotonic()
        for swept in await sweep_all(self._link.ask):
            if swept.outcome == "error":
                logger.error("sweep: task %s (%s): %s", swept.id, swept.kind, swept.error)
            else:
                logger.warning("sweep: task %s (%s): %s", swept.id, swept.kind, swept.outcome)
                self._suspected = self._suspected or swept.outcome == "suspect"
        return time.monotonic() - began

    async def _prune(self) -> float:
        """Prune one batch; returns the seconds until the next."""
        if self._retention is None:
            return PRUNE_EVERY
        query = protocol.prune(self._retention, self._retention * UNCONSUMED, False, PRUNE_BATCH)
        touched: int = (await self._link.ask(query))[0][0]
        return _PRUNE_AGAIN if touched else PRUNE_EVERY

    async def _look_for_suspects(self) -> None:
        if self._on_suspects is not None and self._pairs:
            found = await self._link.ask(protocol.suspects(self._pairs))
            if found[0][0]:
                await self._on_suspects()


async def sweep_all(
    ask: Callable[[Query], Awaitable[list[tuple[object, ...]]]],
) -> list[Swept]:
    """Sweep until nothing more is found."""
    done: list[Swept] = []
    while True:
        rows = [protocol.swept(row) for row in await ask(protocol.sweep(SWEEP_BATCH))]
        done += rows
        if sum(row.outcome != "error" for row in rows) < SWEEP_BATCH:
            return done
