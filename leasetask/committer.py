"""Group commit: what runs have ready at the same moment goes to the server as one statement.

There is no timer. An idle worker commits at once; while a statement is under way the next batch
gathers. A batch holds one item per task: checkpoints of one task are merged, and its end waits for
them. What fails as a batch is sent again one by one, so a bad item never takes others down.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from leasetask import protocol
from leasetask.connection import is_disconnect, is_transient, translated
from leasetask.errors import LeaseLost
from leasetask.link import Link
from leasetask.model import Ack, Checkpoint, Fail, Finish, Note, Release, Suspend
from leasetask.protocol import Item, Query
from leasetask.run import Run

logger = logging.getLogger("leasetask")

BATCH = 500
"""Items in one statement at the most."""

_LOCKED_PAUSE = 0.002, 0.02
"""Seconds before an item whose row somebody holds is tried again: at first (mostly it is this worker's
own heartbeat), and at the most."""

Request = Checkpoint | Note
End = Finish | Suspend | Release | Fail
_ORDER: tuple[type[Request | End], ...] = (Checkpoint, Note, Finish, Suspend, Release, Fail)


@dataclass(slots=True, eq=False)
class _Entry:
    run: Run
    body: Any
    future: asyncio.Future[Ack]
    alone: bool = False
    locked: int = 0


class Committer:
    """Takes requests and ends from runs, and answers each once the server has."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._queues: dict[type, list[_Entry]] = {kind: [] for kind in _ORDER}
        self._unacked: Counter[Run] = Counter()
        self._wake = asyncio.Event()
        self._closed = False

    async def send(self, run: Run, request: Request) -> Ack:
        """Commit a checkpoint or note.

        Raises:
            LeaseLost: the token is not the row's any more.
            PayloadError: the server refused the value.
        """
        self._unacked[run] += 1
        try:
            return await self._add(run, request)
        finally:
            self._unacked[run] -= 1
            if not self._unacked[run]:
                del self._unacked[run]
                self._wake.set()

    async def snapshot(self) -> str:
        """Return the server's current snapshot."""
        return str((await self._link.ask(protocol.SNAPSHOT))[0][0])

    def end(self, run: Run, outcome: End) -> asyncio.Future[Ack]:
        """Commit a run's end."""
        return self._add(run, outcome)

    def close(self) -> None:
        """Refuse what is queued and what comes: nobody will commit it any more."""
        self._closed = True
        for queue in self._queues.values():
            for entry in queue:
                _refuse([entry], _stopped(entry.run))
            queue.clear()

    def _add(self, run: Run, body: Request | End) -> asyncio.Future[Ack]:
        entry = _Entry(run, body, run.loop.create_future())
        if self._closed:
            _refuse([entry], _stopped(run))
        else:
            self._queues[type(body)].append(entry)
            self._wake.set()
        return entry.future

    async def serve(self) -> None:
        """Commit what comes, for ever: a batch of each kind in turn, so that none waits for another."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            for kind in _ORDER:
                if batch := self._take(kind):
                    self._wake.set()
                    await self._commit(kind, batch)

    # --- batches -----------------------------------------------------------------------------

    def _take(self, kind: type) -> list[list[_Entry]]:
        """Take the next batch from a queue: per task, the entries that travel as one item."""
        queue = self._queues[kind]
        if not queue:
            return []
        if queue[0].alone:
            return [[queue.pop(0)]]
        by_run: dict[Run, list[_Entry]] = {}
        left: list[_Entry] = []
        ends = kind not in (Checkpoint, Note)
        for entry in queue:
            if entry.alone or len(by_run) >= BATCH or (ends and self._unacked[entry.run]):
                left.append(entry)
            elif entry.run not in by_run:
                by_run[entry.run] = [entry]
            elif kind is Checkpoint:
                by_run[entry.run].append(entry)
            else:
                left.append(entry)
        self._queues[kind] = left
        return list(by_run.values())

    async def _commit(self, kind: type, batch: list[list[_Entry]]) -> None:
        items = [Item(e[0].run.claimed.id, e[0].run.claimed.token, _merged(e)) for e in batch]
        lease = max(e[0].run.lease for e in batch)
        sent_at = time.monotonic()
        try:
            rows = await self._link.try_once(_query(kind, items, lease, sent_at))
        except Exception as error:
            await self._failed(kind, batch, error)
            return
        for entries, row in zip(batch, rows, strict=True):
            ack = protocol.ack(row) if kind in (Checkpoint, Note) else protocol.end_ack(row)
            if ack.answer == "locked":
                self._later(kind, entries)
                continue
            if ack.answer == "already" and len(entries) > 1:
                self._settle_known(kind, entries, ack, sent_at)
            else:
                _settle(entries, ack, sent_at)

    def _settle_known(self, kind: type, entries: list[_Entry], ack: Ack, sent_at: float) -> None:
        """Of a merged item, some had been committed with a lost answer; the rest was not written."""
        recorded = (ack.recorded or {}).keys()
        known = [entry for entry in entries if entry.body.records.keys() <= recorded]
        self._queues[kind] += [entry for entry in entries if entry not in known]
        self._wake.set()
        if known:
            _settle(known, ack, sent_at)

    async def _failed(self, kind: type, batch: list[list[_Entry]], error: Exception) -> None:
        entries = [entry for item in batch for entry in item]
        if is_disconnect(error) or is_transient(error):
            self._queues[kind][:0] = entries
            self._wake.set()
            await asyncio.sleep(0.01)
        elif len(batch) > 1:
            for entry in entries:
                entry.alone = True
            self._queues[kind][:0] = entries
            self._wake.set()
        else:
            _refuse(entries, translated(error) or error)

    def _later(self, kind: type, entries: list[_Entry]) -> None:
        for entry in entries:
            entry.locked += 1

        def again() -> None:
            self._queues[kind].extend(entries)
            self._wake.set()

        first, longest = _LOCKED_PAUSE
        pause = min(longest, first * 2 ** min(entries[0].locked - 1, 10))
        asyncio.get_running_loop().call_later(pause, again)


def _refuse(entries: list[_Entry], error: Exception) -> None:
    for entry in entries:
        if not entry.future.done():
            entry.future.set_exception(error)
            entry.future.exception()  # a run that was dropped asks no more: nothing for asyncio to log


def _stopped(run: Run) -> LeaseLost:
    return LeaseLost(f"{run.label}: its worker has stopped")


def _merged(entries: list[_Entry]) -> Any:
    """Make one item of what a task has ready."""
    if len(entries) == 1:
        return entries[0].body
    records: dict[str, str] = {}
    for entry in entries:
        records.update(entry.body.records)
    return Checkpoint(records, sum(entry.body.compensations for entry in entries))


def _query(kind: type, items: list[Item[Any]], lease: float, now: float) -> Query:
    if kind is Checkpoint:
        return protocol.checkpoint(items, lease)
    if kind is Note:
        return protocol.note(items, lease)
    if kind is Suspend:
        return protocol.suspend(items, now)
    if kind is Finish:
        return protocol.finish(items)
    return protocol.release(items) if kind is Release else protocol.fail(items)


def _settle(entries: list[_Entry], ack: Ack, sent_at: float) -> None:
    run = entries[0].run
    if ack.answer == "lost":
        run.lose("its lease went to another worker, or was swept")
        _refuse(entries, LeaseLost(f"{run.label}: {run.lost}; nothing was recorded"))
        return
    if isinstance(entries[0].body, Checkpoint):
        run.attempt = 1
    if isinstance(entries[0].body, Checkpoint | Note):
        run.renew(sent_at)
        if ack.cancel_requested:
            run.request_cancel()
    for entry in entries:
        if not entry.future.done():
            entry.future.set_result(ack)
