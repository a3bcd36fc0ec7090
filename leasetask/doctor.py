"""What is wrong with an installation, and the command that mends each finding."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from leasetask import protocol
from leasetask.protocol import KindStats, Query

DECLARED_FOR = 300.0
"""Seconds after which a kind that no worker has declared again counts as one that nobody runs."""

_SKEW = 2.0
"""Seconds between two clocks that are worth a word."""

_CONNECTIONS_SHARE = 0.8

Ask = Callable[[Query], list[tuple[Any, ...]]]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        level: `error` keeps tasks from running, `warning` makes them slow or may become an error.
        mend: a command, or what to do.
    """

    level: Literal["error", "warning"]
    what: str
    mend: str


def examine(ask: Ask, *, pooled: bool) -> list[Finding]:
    """Look at everything; `pooled`: a transaction-mode pooler stands in between."""
    checks = (
        _clock,
        _kinds,
        _expired,
        _undelivered,
        _dead_letters,
        _transactions,
        _dead_rows,
        _autovacuum,
        _indexes,
        _connections,
    )
    findings = [finding for check in checks for finding in check(ask)]
    if pooled:
        findings.append(
            Finding(
                "warning",
                "a transaction-mode pooler stands in between: LISTEN hears nothing, only polling works",
                "leasetask worker … --listen-dsn with a direct DSN, for lower latency",
            )
        )
    return findings


def unsupported(stats: list[KindStats]) -> list[KindStats]:
    """Return the kinds with tasks that nobody can run: no worker has declared them of late."""
    return [
        s
        for s in stats
        if (s.declared_ago is None or s.declared_ago > DECLARED_FOR)
        and s.ready + s.later + s.waiting > 0
    ]


def _clock(ask: Ask) -> Iterator[Finding]:
    before = time.time()
    skew = ask(protocol.SERVER_CLOCK)[0][0] - (before + time.time()) / 2
    if abs(skew) > _SKEW:
        yield Finding(
            "warning",
            f"this machine's clock is {abs(skew):.1f} s {'behind' if skew > 0 else 'ahead of'} "
            "the server's; leasetask goes by the server's, people go by both",
            "timedatectl set-ntp true",
        )


def _kinds(ask: Ask) -> Iterator[Finding]:
    stats = [KindStats(*row) for row in ask(protocol.stats(300.0, 1000))]
    for s in unsupported(stats):
        yield Finding(
            "error",
            f"nobody runs {s.kind} version {s.version}: {_counted(s.ready + s.later + s.waiting, 'task')}, "
            f"the oldest due for {s.oldest_ready or 0:.0f} s",
            f"start a worker that declares it, or put accepts=({s.version},) on the newer handler",
        )
    for s in stats:
        if s.paused and s.ready:
            yield Finding(
                "warning",
                f"{s.kind} version {s.version} is paused with {_counted(s.ready, 'task')} ready",
                f"leasetask resume {s.kind}",
            )


def _expired(ask: Ask) -> Iterator[Finding]:
    number, oldest = ask(protocol.EXPIRED_LEASES)[0]
    if number:
        yield Finding(
            "error",
            f"{_counted(number, 'lease')} ran out up to {oldest:.0f} s ago and nobody sweeps",
            "leasetask sweep   (from cron, or a worker with --role sweep)",
        )


def _undelivered(ask: Ask) -> Iterator[Finding]:
    number = ask(protocol.UNDELIVERED_FOR_LONG)[0][0]
    if number:
        yield Finding(
            "error",
            f"{_counted(number, 'signal')} not delivered for more than 30 s",
            "start a worker; or see who holds a row of their waiters in a long transaction",
        )


def _dead_letters(ask: Ask) -> Iterator[Finding]:
    number = ask(protocol.DEAD_LETTERS)[0][0]
    if number:
        most = "at least " if number >= 1000 else ""
        yield Finding(
            "warning",
            f"{most}{_counted(number, 'task')} ended failed or dead: a person has to look",
            "leasetask dead-letter, and when the cause is mended, leasetask retry",
        )


def _transactions(ask: Ask) -> Iterator[Finding]:
    for pid, name, state, seconds in ask(protocol.LONG_TRANSACTIONS):
        yield Finding(
            "warning",
            f"the transaction of pid {pid} ({name or 'no name'}, {state}) is open for "
            f"{seconds:.0f} s and holds back vacuum",
            f"select pg_terminate_backend({pid})",
        )


def _dead_rows(ask: Ask) -> Iterator[Finding]:
    for table, live, dead, vacuumed in ask(protocol.DEAD_ROWS):
        yield Finding(
            "warning",
            f"leasetask.{table} has {dead} dead rows beside {live} live ones, vacuumed "
            f"{vacuumed or 'never'}",
            f"vacuum leasetask.{table}",
        )


def _autovacuum(ask: Ask) -> Iterator[Finding]:
    if ask(protocol.AUTOVACUUM)[0][0] != "on":
        yield Finding("error", "autovacuum is off", "alter system set autovacuum = on")


def _indexes(ask: Ask) -> Iterator[Finding]:
    found: dict[str, bool] = dict(ask(protocol.INDEXES))
    for name in sorted(protocol.EXPECTED_INDEXES - found.keys()):
        yield Finding("error", f"index leasetask.{name} is missing", "psql -f schema.sql")
    for name in sorted(name for name, valid in found.items() if not valid):
        yield Finding(
            "error", f"index leasetask.{name} is invalid", f"reindex index leasetask.{name}"
        )


def _connections(ask: Ask) -> Iterator[Finding]:
    used, most = ask(protocol.CONNECTIONS)[0]
    if used > most * _CONNECTIONS_SHARE:
        yield Finding(
            "warning",
            f"{used} of {most} connections are in use",
            "fewer workers with more --concurrency each, a pooler, or a higher max_connections",
        )


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
