"""The outbox: rows written in another database's transaction become tasks, each exactly one.

One transaction there holds the rows while they are enqueued here. Killed in between, the rows stay
pending and are enqueued again; their keys find the tasks that exist already.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import groupby
from typing import Any

import psycopg

from leasetask import client, protocol
from leasetask.connection import connect, fetch, is_disconnect, is_transient, translated
from leasetask.errors import IdempotencyConflict, SchemaError

logger = logging.getLogger("leasetask")

BATCH = 500
"""Rows in one transaction at the most."""

_NO_TABLE = "there is no table outbox_event; run `leasetask outbox install`"


@dataclass(frozen=True, slots=True)
class Dispatched:
    """What one round did.

    Attributes:
        enqueued: rows that are tasks now. refused: rows marked with their error.
    """

    enqueued: int
    refused: int

    @property
    def rows(self) -> int:
        """Rows dealt with."""
        return self.enqueued + self.refused


@dataclass(frozen=True, slots=True)
class _Event:
    id: int
    kind: str
    key: str
    payload: str


@dataclass(frozen=True, slots=True)
class _Settled:
    id: int
    task_id: str | None
    error: str | None


def install(business_dsn: str) -> None:
    """Create `outbox_event` in the business's database, in the schema that its search path names.

    Raises:
        DatabaseUnavailable: no connection could be had.
    """
    text = resources.files("leasetask").joinpath("outbox.sql").read_text(encoding="utf-8")
    with connect(business_dsn, name="leasetask outbox") as conn, conn.transaction():
        conn.execute(text.encode())


def dispatch(business_dsn: str, engine_dsn: str) -> Dispatched:
    """Move what is pending into tasks, once round.

    Raises:
        DatabaseUnavailable: one of the databases is away; nothing is lost.
        SchemaError: `outbox_event` is not there, or the engine's schema is not.
    """
    enqueued = refused = 0
    with (
        connect(business_dsn, name="leasetask outbox") as business,
        connect(engine_dsn, name="leasetask outbox") as engine,
    ):
        while True:
            done = _dispatch_batch(business, engine)
            enqueued += sum(event.error is None for event in done)
            refused += sum(event.error is not None for event in done)
            if len(done) < BATCH:
                return Dispatched(enqueued, refused)


def prune(business_dsn: str, age: float) -> int:
    """Delete dispatched rows older than `age` seconds; returns how many."""
    total = 0
    with connect(business_dsn, name="leasetask outbox") as conn:
        try:
            while count := fetch(conn, protocol.outbox_prune(age, BATCH))[0][0]:
                total += int(count)
        except psycopg.errors.UndefinedTable as error:
            raise SchemaError(_NO_TABLE) from error
    return total


def _dispatch_batch(
    business: psycopg.Connection[Any], engine: psycopg.Connection[Any]
) -> list[_Settled]:
    with business.transaction():
        try:
            rows = fetch(business, protocol.outbox_take(BATCH))
        except psycopg.errors.UndefinedTable as error:
            raise SchemaError(_NO_TABLE) from error
        events = sorted((_Event(*row) for row in rows), key=lambda event: event.kind)
        settled: list[_Settled] = []
        for kind, group in groupby(events, key=lambda event: event.kind):
            settled += _enqueue(engine, kind, list(group))
        if settled:
            query = protocol.outbox_settle(
                [s.id for s in settled], [s.task_id for s in settled], [s.error for s in settled]
            )
            fetch(business, query)
    return settled


def _enqueue(
    engine: psycopg.Connection[Any], kind: str, events: Sequence[_Event]
) -> list[_Settled]:
    """Enqueue one kind's rows; those that the engine refuses do not stop the others."""
    call = client.enqueue_many(
        kind, None, [e.payload for e in events], [e.key for e in events], None, None, None
    )
    try:
        client.check_name("kind", kind)
        made = client.run(call, lambda query: fetch(engine, query))
    except Exception as error:
        if is_disconnect(error) or is_transient(error) or isinstance(error, SchemaError):
            raise
        if len(events) == 1:
            reason = translated(error) or error
            logger.warning("outbox: event %s (%s) is refused: %s", events[0].id, kind, reason)
            return [_Settled(events[0].id, None, str(reason))]
        return [settled for event in events for settled in _enqueue(engine, kind, [event])]
    return [
        _Settled(
            event.id, task.id, _conflict(event, task.id) if task.outcome == "conflict" else None
        )
        for event, task in zip(events, made, strict=True)
    ]


def _conflict(event: _Event, task_id: str) -> str:
    error = IdempotencyConflict(
        f"key {event.key!r} of kind {event.kind} names task {task_id}, which has another input",
        task_id=task_id,
    )
    logger.warning("outbox: event %s is refused: %s", event.id, error)
    return str(error)
