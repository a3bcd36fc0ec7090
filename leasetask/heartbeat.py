"""Keeps leases: one thread renews them, another watches the clocks, whatever the event loop does."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from itertools import groupby
from typing import Any

import psycopg

from leasetask import protocol
from leasetask.connection import connect, fetch, shut
from leasetask.errors import DatabaseUnavailable
from leasetask.run import Run

logger = logging.getLogger("leasetask")


class Heartbeat(threading.Thread):
    """Renews the leases of all runs in one statement, on a connection of its own.

    Args:
        dsn: the server.
        lease: the shortest lease, in seconds; a beat is sent every third of it.
        runs: gives the runs that this worker holds.
        on_death: called with the error if the thread cannot go on.
    """

    def __init__(
        self,
        dsn: str,
        lease: float,
        runs: Callable[[], Collection[Run]],
        on_death: Callable[[BaseException], None],
    ) -> None:
        super().__init__(name="leasetask-heartbeat", daemon=True)
        self._dsn = dsn
        self._interval = lease / 3
        self._lease = lease
        self._runs = runs
        self._on_death = on_death
        self._soon = threading.Event()
        self._stopping = False
        self._conn: psycopg.Connection[Any] | None = None
        self._failing_since: float | None = None
        self._beating_since: float | None = None
        self._well_at = time.monotonic()

    @property
    def healthy(self) -> bool:
        """Whether leases can be kept: False after a whole lease without a successful beat."""
        return time.monotonic() - self._well_at < self._lease

    def end_if_stuck(self) -> None:
        """Give up a connection that has been silent for half a lease; from another thread."""
        since, conn = self._beating_since, self._conn
        if since is not None and conn is not None and time.monotonic() - since > self._lease / 2:
            shut(conn)

    def beat_soon(self) -> None:
        """Send a beat now: somebody may have asked for a cancel."""
        self._soon.set()

    def stop(self) -> None:
        """End the thread after the beat under way."""
        self._stopping = True
        self._soon.set()

    def run(self) -> None:
        """Beat until stopped."""
        try:
            while not self._stopping:
                self._soon.wait(self._interval if self._failing_since is None else 0.2)
                self._soon.clear()
                self._beat_or_report()
            if self._conn is not None:
                self._conn.close()
        except BaseException as error:
            self._on_death(error)

    def _beat_or_report(self) -> None:
        self._beating_since = time.monotonic()
        try:
            self._beat()
        except (DatabaseUnavailable, psycopg.Error) as error:
            if self._failing_since is None:
                self._failing_since = time.monotonic()
                logger.warning(
                    "heartbeat: not sent, trying again: %s", " ".join(str(error).split())
                )
            if self._conn is not None:
                self._conn.close()
                self._conn = None
        else:
            self._well_at = time.monotonic()
            if self._failing_since is not None:
                self._failing_since = None
                logger.warning("heartbeat: leases are renewed again")
        finally:
            self._beating_since = None

    def _beat(self) -> None:
        # One item per task: one that came back to this worker may still have an old run.
        newest = {run.claimed.id: run for run in self._runs() if run.lost is None}
        runs = sorted(newest.values(), key=lambda run: run.lease)
        if not runs and self._failing_since is None:
            return
        if self._conn is None:
            self._conn = connect(self._dsn, name="leasetask heartbeat")
        fetch(self._conn, protocol.PING)
        for lease, group in groupby(runs, key=lambda run: run.lease):
            self._renew(self._conn, list(group), lease)

    def _renew(self, conn: psycopg.Connection[Any], runs: list[Run], lease: float) -> None:
        news = [run.news() for run in runs]
        ids = [run.claimed.id for run in runs]
        tokens = [run.claimed.token for run in runs]
        sent_at = time.monotonic()
        rows = fetch(conn, protocol.heartbeat(ids, tokens, lease, news))
        for row, run, told in zip(rows, runs, news, strict=True):
            ack = protocol.ack(row)
            if ack.answer == "done":
                run.was_told(told)
            if ack.answer == "lost":
                if not run.ending:
                    run.lose("its lease went to another worker, or was swept")
            elif ack.answer == "done" or run.holds_row:
                # A row locked by our own transaction: nobody can sweep it, and the fence renews it.
                run.renew(sent_at)
                if ack.cancel_requested:
                    run.request_cancel()


class Watchdog(threading.Thread):
    """Declares leases lost when their local deadline passes, and runs when their time is over.

    Never talks to the server: a statement that hangs must not hide that a lease has run out.
    """

    def __init__(
        self, lease: float, runs: Callable[[], Collection[Run]], heartbeat: Heartbeat
    ) -> None:
        super().__init__(name="leasetask-watchdog", daemon=True)
        self._heartbeat = heartbeat
        self._tick = min(1.0, max(0.02, lease / 20))
        self._runs = runs
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    def run(self) -> None:
        """Look until stopped."""
        while not self._stopped.wait(self._tick):
            now = time.monotonic()
            self._heartbeat.end_if_stuck()
            for run in self._runs():
                if now > run.lease_ends and run.lost is None:
                    logger.warning("%s: lease lost, not renewed in time", run.label)
                    run.lose("its lease was not renewed in time")
                time_out = run.on_timeout
                if run.times_out_at is not None and now > run.times_out_at and time_out is not None:
                    time_out()
