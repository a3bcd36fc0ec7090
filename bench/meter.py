"""What a piece of work cost: WAL, statements, row versions, CPU of the client and of the server."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psycopg

from bench.server import Server

_TICK = os.sysconf("SC_CLK_TCK")

# The observer's own statements are left out.
_STATEMENTS = """
select coalesce(sum(s.calls), 0)::bigint from pg_stat_statements s
where s.dbid = (select oid from pg_database where datname = current_database())
  and s.query not like '%/* observer */%'"""

_ROWS = """
select /* observer */
  coalesce(sum(n_tup_ins + n_tup_upd + n_tup_del) filter (where schemaname <> 'pg_toast'), 0)::bigint,
  coalesce(sum(n_tup_upd), 0)::bigint, coalesce(sum(n_tup_hot_upd), 0)::bigint,
  coalesce(sum(n_tup_ins) filter (where schemaname = 'pg_toast'), 0)::bigint
from pg_stat_all_tables where schemaname not in ('pg_catalog', 'information_schema')"""


@dataclass(frozen=True)
class Reading:
    """The counters that are exact at any moment."""

    at: float
    wal: int
    statements: int
    client: float
    server: float

    def until(self, later: Reading, units: int) -> dict[str, float]:
        """Return the costs per unit between this reading and a later one."""
        return {
            "wal_bytes": (later.wal - self.wal) / units,
            "statements": (later.statements - self.statements) / units,
            "client_us": (later.client - self.client) / units * 1e6,
            "server_us": (later.server - self.server) / units * 1e6,
        }


@dataclass(frozen=True)
class Rows:
    """Row versions written; complete only once the sessions that wrote them have ended."""

    written: int
    updated: int
    hot: int
    toast: int

    def until(self, later: Rows, units: int) -> dict[str, float]:
        """Return the row versions per unit and the share of HOT among the updates."""
        updated = later.updated - self.updated
        return {
            "rows": (later.written - self.written) / units,
            "toast_rows": (later.toast - self.toast) / units,
            "hot_share": (later.hot - self.hot) / updated if updated else 0.0,
        }


class Meter:
    """Reads the counters of one database, its server, and the given client processes."""

    def __init__(self, server: Server, dsn: str) -> None:
        self._server = server
        self._conn = psycopg.connect(
            dsn, autocommit=True, prepare_threshold=None, application_name="bench"
        )

    def read(self, clients: Iterable[int] = ()) -> Reading:
        """Read what is exact now; `clients`: process ids whose CPU counts."""
        wal = self.value("select /* observer */ (pg_current_wal_lsn() - '0/0')::bigint")
        return Reading(
            time.monotonic(),
            int(wal),
            int(self.value(_STATEMENTS.replace("select", "select /* observer */", 1))),
            sum(_cpu(pid) + _cpu_of_children(pid) for pid in clients),
            _cpu_of_server(self._server.postmaster),
        )

    def rows(self) -> Rows:
        """Read the row versions; waits until the writing sessions are gone."""
        others = (
            "select /* observer */ count(*) from pg_stat_activity where datname = current_database() "
            "and backend_type = 'client backend' and pid <> pg_backend_pid() "
            "and application_name <> 'bench'"
        )
        deadline = time.monotonic() + 5
        while self.value(others) and time.monotonic() < deadline:
            time.sleep(0.02)
        row = self._conn.execute(_ROWS).fetchone()
        assert row is not None
        return Rows(*row)

    def value(self, query: str) -> Any:
        """Return the single value of a query."""
        row = self._conn.execute(query).fetchone()
        assert row is not None
        return row[0]

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._conn.close()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used."""
    return _cpu(pid)


def _fields(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _cpu(pid: int) -> float:
    fields = _fields(pid)
    return (int(fields[11]) + int(fields[12])) / _TICK if fields else 0.0


def _cpu_of_children(pid: int) -> float:
    """CPU of children that have ended and were waited for."""
    fields = _fields(pid)
    return (int(fields[13]) + int(fields[14])) / _TICK if fields else 0.0


def _cpu_of_server(postmaster: int) -> float:
    children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
    living = sum(_cpu(int(pid)) for pid in children)
    return _cpu(postmaster) + _cpu_of_children(postmaster) + living
