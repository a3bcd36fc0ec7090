"""A business write, the checkpoint that records it and the fence that guards it, in one commit.

READ COMMITTED: the fence, our checkpoint, comes last, so heartbeats go on meanwhile. Asked for a
higher isolation, the transaction locks the task's row first; that lock is then the lease, since
heartbeat and sweep pass over locked rows. The server ends a transaction that idles for a whole
lease, so a frozen worker cannot hold business rows against the rightful owner; a transaction whose
lease is kept is pinged, so that it may idle longer.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import psycopg
from psycopg.errors import ReadOnlySqlTransaction
from psycopg.pq import TransactionStatus

from leasetask import hosts, protocol
from leasetask.connection import is_disconnect, is_transient, shut, sqlstate
from leasetask.errors import LeaseLost
from leasetask.model import Ack
from leasetask.operations import tell, tell_async
from leasetask.protocol import Query
from leasetask.run import Run

logger = logging.getLogger("leasetask")

Isolation = Literal["read committed", "repeatable read", "serializable"]

_PAUSE = 0.01
"""Seconds before a transaction that was refused for the moment is run again."""

_TRANSIENT_TRIES = 20
"""Serialization failures in a row before they count as the step's failure."""


@dataclass(slots=True)
class Fenced:
    """What to do in one transaction: the user's function, and the fence for its result.

    Attributes:
        function: called with the connection and `args`; a coroutine function in an async handler.
        fence: encodes the function's value into the query that records it; raises PayloadError.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    fence: Callable[[Any], Query]
    isolation: Isolation = "read committed"
    name: str = ""


class _RollBack(Exception):
    """Leaves the transaction's block, so that whoever opened it rolls it back."""

    def __init__(self, ack: Ack) -> None:
        self.ack = ack


@dataclass(eq=False, slots=True)
class OpenTransaction:
    """A transaction under way, as the keeper sees it."""

    run: Run
    connection: Any
    lease_seen: float = field(default=0.0)
    in_function: bool = field(default=False)


def run_blocking(run: Run, work: Fenced) -> tuple[Any, Ack]:
    """Run it in the handler's thread; returns the function's value and the fence's answer."""
    judge = _attempts(run)
    next(judge)
    while True:
        opened: OpenTransaction | None = None
        try:
            with run.transactions.open(work.isolation) as db:
                hosts.execute(db, _first(run, work))
                opened = run.transactions.keeper.watch(run, db)
                tell(run, "before the body of", work.name)
                opened.in_function = True
                value = work.function(db, *work.args)
                opened.in_function = False
                ack = protocol.ack(hosts.execute(db, work.fence(value))[0])
                if ack.answer != "done":
                    raise _RollBack(ack)
                tell(run, "before the commit of", work.name)
            tell(run, "after the commit of", work.name)
            return value, ack
        except Exception as error:
            answered = judge.send((error, _is_ours(error, opened)))
            if isinstance(answered, Ack):
                return None, answered
            time.sleep(answered)
        finally:
            run.transactions.keeper.forget(opened)


async def run_awaiting(run: Run, work: Fenced) -> tuple[Any, Ack]:
    """Run it in the event loop."""
    judge = _attempts(run)
    next(judge)
    while True:
        opened: OpenTransaction | None = None
        try:
            async with run.transactions.open_async(work.isolation) as db:
                await hosts.execute_async(db, _first(run, work))
                opened = run.transactions.keeper.watch(run, db)
                await tell_async(run, "before the body of", work.name)
                opened.in_function = True
                value = await work.function(db, *work.args)
                opened.in_function = False
                rows = await hosts.execute_async(db, work.fence(value))
                ack = protocol.ack(rows[0])
                if ack.answer != "done":
                    raise _RollBack(ack)
                await tell_async(run, "before the commit of", work.name)
            await tell_async(run, "after the commit of", work.name)
            return value, ack
        except Exception as error:
            answered = judge.send((error, _is_ours(error, opened)))
            if isinstance(answered, Ack):
                return None, answered
            await asyncio.sleep(answered)
        finally:
            run.transactions.keeper.forget(opened)


def _first(run: Run, work: Fenced) -> Query:
    run.holds_row = work.isolation != "read committed"
    return protocol.open_fenced(run.claimed.id, run.claimed.token, run.lease, lock=run.holds_row)


def _is_ours(error: Exception, opened: OpenTransaction | None) -> bool:
    """Whether an error tells of this transaction's connection, not of one that the user's code has."""
    if opened is None or not opened.in_function or opened.connection is None:
        return True
    return opened.connection.closed or isinstance(error, ReadOnlySqlTransaction)


def _attempts(run: Run) -> Generator[float | Ack, tuple[Exception, bool], None]:
    """Judge what ended an attempt: give the answer, the seconds until the next try, or raise.

    It is sent the error, and whether that tells of our own connection. After one was lost the commit
    may have landed all the same: the next try's fence says `already` then, and what that try wrote is
    rolled back.
    """
    transient = 0
    answer: float | Ack = 0.0
    while True:
        error, ours = yield answer
        run.holds_row = False
        if isinstance(error, _RollBack):
            if error.ack.answer == "lost":
                run.lose("its lease went to another worker, or was swept")
            elif error.ack.answer == "already":
                answer = error.ack
                continue
        elif sqlstate(error) == "LT005":
            run.lose("its lease went to another worker, or was swept")
        elif is_transient(error):
            transient += 1
            if transient > _TRANSIENT_TRIES:
                raise error
        elif not (ours and is_disconnect(error)):
            raise error
        if run.lost is not None:
            raise LeaseLost(f"{run.label}: {run.lost}; its transaction was rolled back") from error
        answer = _PAUSE * random.uniform(0.5, 1.5) * min(1 + transient, 10)


class Keeper(threading.Thread):
    """Pings the transactions whose leases are kept, and cuts off those whose lease is lost."""

    def __init__(self, lease: float) -> None:
        super().__init__(name="leasetask-transactions", daemon=True)
        self._tick = lease / 4
        self._open: set[OpenTransaction] = set()
        self._stopped = threading.Event()

    def watch(self, run: Run, db: Any) -> OpenTransaction:
        """Take care of a transaction that has begun."""
        opened = OpenTransaction(run, hosts.driver_connection(db), run.lease_ends)
        self._open.add(opened)
        return opened

    def forget(self, opened: OpenTransaction | None) -> None:
        """It has ended."""
        if opened is not None:
            opened.run.holds_row = False
            self._open.discard(opened)

    def opened(self) -> list[OpenTransaction]:
        """Return the transactions under way."""
        return list(self._open)

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    def run(self) -> None:
        """Look at the open transactions until stopped."""
        while not self._stopped.wait(self._tick):
            for opened in self.opened():
                self._keep(opened)

    def _keep(self, opened: OpenTransaction) -> None:
        connection = opened.connection
        if connection is None or connection.closed:
            return
        if opened.run.lost is not None:
            shut(connection)
        elif opened.run.lease_ends > opened.lease_seen or opened.run.holds_row:
            opened.lease_seen = opened.run.lease_ends
            if isinstance(connection, psycopg.Connection):
                _ping(connection)
            else:
                asyncio.run_coroutine_threadsafe(_ping_async(connection), opened.run.loop)


def _ping(connection: psycopg.Connection[Any]) -> None:
    """Start the idle timer anew; a connection that is busy has none running."""
    if connection.lock.acquire(blocking=False):
        try:
            if connection.pgconn.transaction_status == TransactionStatus.INTRANS:
                connection.pgconn.exec_(b"select 1")
        except psycopg.Error as error:
            logger.debug("transaction ping: %s", error)
        finally:
            connection.lock.release()


async def _ping_async(connection: psycopg.AsyncConnection[Any]) -> None:
    if connection.lock.locked() or connection.closed:
        return
    if connection.pgconn.transaction_status == TransactionStatus.INTRANS:
        with suppress(psycopg.Error):
            await connection.execute(*protocol.PING)
