"""pgbouncer in transaction mode, as many installations have it before their database."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from servers import Folder, free_port, server_user
from support import wait_until

PROGRAM = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")


@contextmanager
def pooled(dsn: str) -> Iterator[str]:
    """Give a DSN that leads to the same database through pgbouncer; skips where there is none."""
    if PROGRAM is None:
        pytest.skip("pgbouncer is not installed")
    parts = conninfo_to_dict(dsn)
    target = " ".join(
        f"{key}={parts[key]}"
        for key in ("host", "port", "dbname", "user", "password")
        if parts.get(key)
    )
    port = free_port()
    with Folder() as folder:
        ini = folder / "pgbouncer.ini"
        ini.write_text(
            f"""[databases]
{parts["dbname"]} = {target}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 8
max_client_conn = 200
logfile = {folder}/pgbouncer.log
pidfile = {folder}/pgbouncer.pid
"""
        )
        process = subprocess.Popen(
            [PROGRAM, ini], user=server_user(), cwd="/", stderr=subprocess.DEVNULL
        )
        through = make_conninfo(
            host="127.0.0.1", port=port, dbname=parts["dbname"], user=parts.get("user", "postgres")
        )
        try:
            wait_until(lambda: _answers(through), 10, "for pgbouncer")
            yield through
        finally:
            process.kill()
            process.wait()


def _answers(dsn: str) -> bool:
    try:
        psycopg.connect(dsn, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True
