"""A table in the scratch database as a world; one connection to each, since a run opens many."""

from __future__ import annotations

import functools
from typing import Any

import psycopg


@functools.cache
def database(dsn: str) -> psycopg.Connection[Any]:
    return psycopg.connect(dsn, autocommit=True)


def with_table(dsn: str) -> str:
    """Make the world anew: nothing is booked."""
    db = database(dsn)
    db.execute("create table if not exists booking (what text)")
    db.execute("delete from booking")
    return dsn


def bookings(dsn: str) -> list[str]:
    return [row[0] for row in database(dsn).execute("select what from booking order by 1")]
