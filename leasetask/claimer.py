"""Decides where claims begin, how long to pause between them, and whether to be notified."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from leasetask import protocol
from leasetask.connection import is_disconnect, is_transient
from leasetask.link import Link
from leasetask.model import Claimed
from leasetask.protocol import Lane

_RESCAN = 0.1
"""Seconds between claims that begin at the heads of the lanes, while there is work."""

_SCAN_SHARE = 20
"""A scan that took t seconds is not repeated within this many times t."""

_DEAREST_SCAN = 0.05
"""A scan counts as no dearer, in seconds: a busy machine must not keep it away for long."""

_FIRST_POLL = 0.005
"""Seconds before the second look at an empty queue; doubles up to the worker's interval."""

_BUSY_RATE = 500
"""Tasks per second above which being notified costs the producers more than polling costs us."""

_IDLE_REFRESH = 20.0
"""Seconds after which an idle worker says again that it wants to be notified."""


class Claimer:
    """The claims of one worker.

    A claim begins where the last one in its lane began, since under a snapshot that somebody holds
    open the head of a lane is full of dead entries. Every 100 ms, and whenever nothing was found,
    one begins at the heads: a long transaction may commit rows behind. A scan that is slow is paid
    for by scanning less often.

    Attributes:
        rate: tasks claimed per second, of late.
        answered_at: when the server last answered a claim, by the local monotonic clock.
    """

    def __init__(
        self,
        link: Link,
        owner: str,
        pairs: list[tuple[str, int]],
        *,
        lease: float,
        interval: float,
        suspects: bool,
        hears: Callable[[], bool],
    ) -> None:
        self._link = link
        self._owner = owner
        self._pairs = pairs
        self._lease = lease
        self._interval = interval
        self._suspects = suspects
        self._hears = hears
        self.answered_at = time.monotonic()
        self._sinces: dict[tuple[str, int, int], datetime] = {}
        self._scanned_at = float("-inf")
        self._scan_costs = (0.0, 0.0)
        self._next_due: float | None = None
        self._found = 0
        self._scanned = False
        self._empty_scans = 0
        self._idle_since: float | None = None
        self._window = (time.monotonic(), 0)
        self.rate = 0.0

    async def claim(self, n: int) -> list[Claimed]:
        """Claim up to n tasks; none if the server is away just now."""
        began = time.monotonic()
        self._scanned = self._scan_is_due(began)
        try:
            if self._scanned:
                rows = await self._scan(n, began)
            else:
                lanes = [Lane(*lane, since) for lane, since in self._sinces.items()]
                rows = await self._link.try_once(
                    protocol.claim_lanes(self._owner, lanes, n, self._lease)
                )
        except Exception as error:
            if not (is_disconnect(error) or is_transient(error)):
                raise
            self._sinces = {}
            await asyncio.sleep(_FIRST_POLL)
            rows = []
        else:
            self.answered_at = time.monotonic()
        claimed = [protocol.claimed(row) for row in rows]
        self._remember(claimed)
        return claimed

    @property
    def _scan_cost(self) -> float:
        """What a scan costs, in seconds: a slow head stays slow, a cold plan does not."""
        return min(*self._scan_costs, _DEAREST_SCAN)

    async def claim_suspect(self) -> list[Claimed]:
        """Claim one task that has to be run alone; none if the server is away just now."""
        query = protocol.claim(self._owner, self._pairs, 1, self._lease, suspects=True)
        try:
            rows = await self._link.try_once(query)
        except Exception as error:
            if not (is_disconnect(error) or is_transient(error)):
                raise
            return []
        return [protocol.claimed(row) for row in rows if row[0] is not None]

    async def settle(self) -> float:
        """Return the seconds to pause before the next claim; become idle or busy on the way."""
        now = time.monotonic()
        idle = self._idle_since is not None
        if self._found:
            if idle and self.rate > _BUSY_RATE:
                await self._set_idle(False)
            return 0.0
        if not self._scanned:
            again = self._scanned_at + _SCAN_SHARE * self._scan_cost - now
            return min(self._interval, max(0.0, again))
        stale = idle and now - (self._idle_since or now) > _IDLE_REFRESH
        if (
            self._hears()
            and not self._suspects
            and (stale or (not idle and self.rate < _BUSY_RATE))
        ):
            await self._set_idle(True)
            if not stale:
                return 0.0  # what was committed before we said it notified nobody: look again
        pause: float = min(self._interval, _FIRST_POLL * 2.0 ** min(self._empty_scans, 20))
        if self._next_due is not None:
            pause = min(pause, max(0.0, self._next_due - now))
        return max(pause, _SCAN_SHARE * self._scan_cost if self._scan_cost > _FIRST_POLL else 0.001)

    async def leave(self) -> None:
        """Ask to be notified no more; a server that is away forgets by itself."""
        if self._idle_since is not None:
            try:
                async with asyncio.timeout(1):
                    await self._set_idle(False)
            except Exception as error:
                if not (is_disconnect(error) or isinstance(error, TimeoutError)):
                    raise

    def _scan_is_due(self, now: float) -> bool:
        if self._suspects or not self._sinces:
            return True
        least = 0.0 if not self._found else _RESCAN
        return now - self._scanned_at >= max(least, _SCAN_SHARE * self._scan_cost)

    async def _scan(self, n: int, began: float) -> list[tuple[Any, ...]]:
        rows = await self._link.try_once(
            protocol.claim(self._owner, self._pairs, n, self._lease, suspects=self._suspects)
        )
        self._sinces = {}
        self._scanned_at = time.monotonic()
        self._scan_costs = (self._scan_costs[1], self._scanned_at - began if len(rows) < n else 0.0)
        self._next_due = None
        if rows and rows[-1][0] is None:
            self._next_due = self._scanned_at + protocol.seconds_until_due(rows.pop())
        return rows

    def _remember(self, claimed: list[Claimed]) -> None:
        first: dict[tuple[str, int, int], datetime] = {}
        for task in claimed:
            lane = (task.kind, task.version, task.priority)
            first[lane] = min(first.get(lane, task.due_at), task.due_at)
        self._sinces.update(first)
        self._found = len(claimed)
        if claimed:
            self._empty_scans = 0
        elif self._scanned:
            self._empty_scans += 1
        began, count = self._window
        now = time.monotonic()
        if now - began >= _RESCAN:
            self.rate = count / (now - began)
            began, count = now, 0
        self._window = (began, count + len(claimed))

    async def _set_idle(self, idle: bool) -> None:
        await self._link.ask(protocol.set_idle(self._owner, idle))
        self._idle_since = time.monotonic() if idle else None
