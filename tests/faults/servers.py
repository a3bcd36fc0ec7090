"""PostgreSQL servers that a test may kill: one alone, or a synchronous pair that fails over."""

from __future__ import annotations

import atexit
import functools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import psycopg
from psycopg.conninfo import make_conninfo
from support import wait_until

from leasetask import embedded

DURABLE = {
    "fsync": "on",
    "synchronous_commit": "on",
    "max_connections": "100",
    "shared_buffers": "64MB",
    "wal_level": "replica",
    "wal_log_hints": "on",
    "wal_retrieve_retry_interval": "200ms",
    "hot_standby": "on",
    "max_wal_senders": "6",
    "max_replication_slots": "6",
}


@functools.cache
def server_user() -> str | None:
    """Return whom servers run as: PostgreSQL refuses root."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


@functools.cache
def binaries() -> Path:
    """Return programs that this user may run: a virtual environment may lie in root's own home."""
    found = embedded._find_binaries()[0]
    if server_user() is None or found.is_relative_to("/usr"):
        return found
    install, package = found.parent, found.parent.parent
    copy = Path(tempfile.mkdtemp(prefix="leasetask-bin-"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    copy.chmod(0o755)
    shutil.copytree(install, copy / package.name / install.name)
    # Its shared libraries lie beside the package, and are found relative to the programs.
    for libraries in package.parent.glob(f"{package.name}*.libs"):
        shutil.copytree(libraries, copy / libraries.name)
    return copy / package.name / install.name / found.name


def run(*command: str | Path) -> str:
    """Run one of the server's programs to its end, as the server's user."""
    done = subprocess.run(
        [binaries() / command[0], *command[1:]],
        user=server_user(),
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One server on a port of its own, on loopback."""

    def __init__(self, folder: Path, name: str = "server", port: int | None = None) -> None:
        self.name = name
        self.port = port or free_port()
        self.data = folder / name
        self._log = (folder / f"{name}.log").open("ab")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def dsn(self) -> str:
        return dsn_of(self.port)

    def create(self) -> None:
        """Make an empty cluster."""
        run("initdb", "-D", self.data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync")
        allow = "host replication postgres 127.0.0.1/32 trust\n"
        with (self.data / "pg_hba.conf").open("a") as rules:
            rules.write(allow)

    def start(self, **settings: str) -> None:
        """Start it and wait until it accepts connections."""
        options = [f"--{name}={value}" for name, value in (DURABLE | settings).items()]
        self._process = subprocess.Popen(
            [binaries() / "postgres", "-D", self.data, "-p", str(self.port), "-k", "",
             "-h", "127.0.0.1", *options],
            user=server_user(), cwd="/", stdout=self._log, stderr=self._log, start_new_session=True,
        )  # fmt: skip
        wait_until(self.answers, 60, f"for {self.name} to accept connections")

    def answers(self) -> bool:
        """Whether it accepts connections."""
        assert self._process is not None
        assert self._process.poll() is None, f"{self.name} ended: see its log"
        with suppress(psycopg.OperationalError), psycopg.connect(self.dsn, connect_timeout=2):
            return True
        return False

    def stop(self, mode: Literal["fast", "immediate"] = "immediate") -> None:
        """Let it end, as `pg_ctl -m` does, and wait until it is gone."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT if mode == "immediate" else signal.SIGINT)
        self._process.wait(60)

    def kill(self) -> None:
        """SIGKILL to the postmaster and all that it has started."""
        assert self._process is not None
        children = _children_of(self._process.pid)
        self._process.kill()
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(60)
        wait_until(lambda: not any(_lives(pid) for pid in children), 10, "for backends to go")

    def end_backends(self, name: str) -> int:
        """End the sessions with this application name; returns how many there were."""
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            rows = conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s",
                [name],
            )
            return len(rows.fetchall())

    def close(self) -> None:
        """Leave no process behind."""
        if self._process is not None and self._process.poll() is None:
            self.kill()
        self._log.close()


class Pair:
    """A primary and its synchronous standby; after a failover the old primary follows the new one."""

    def __init__(self, folder: Path, ports: tuple[int, int] | None = None) -> None:
        ports = ports or (free_port(), free_port())
        self.primary = Server(folder, "one", ports[0])
        self.standby = Server(folder, "two", ports[1])
        self._slots = 0
        self.primary.create()
        self.primary.start()
        self.rebuild()

    def rebuild(self) -> None:
        """Make the standby anew from the primary, and let commits wait for it once it streams."""
        standby = self.standby
        shutil.rmtree(standby.data, ignore_errors=True)
        self._slots += 1
        slot = f"slot_{self._slots}"
        source = f"host=127.0.0.1 port={self.primary.port} user=postgres application_name=standby"
        run("pg_basebackup", "-D", standby.data, "-X", "stream", "-c", "fast", "-C", "-S", slot,
            "-R", "--no-sync", "-d", source)  # fmt: skip
        standby.start()
        wait_until(lambda: self._standby_is("streaming"), 30, "for the standby to stream")
        self._commits_wait_for("standby")
        wait_until(lambda: self._standby_is("streaming", sync=True), 30, "for it to be synchronous")

    def fail_over(self) -> None:
        """Kill the primary; the standby takes its place, alone until `rebuild`."""
        self.primary.kill()
        self.primary, self.standby = self.standby, self.primary
        with psycopg.connect(self.primary.dsn, autocommit=True) as conn:
            conn.execute("select pg_promote()")
        self._commits_wait_for("")
        with psycopg.connect(self.primary.dsn, autocommit=True) as conn:
            conn.execute(
                "select pg_drop_replication_slot(slot_name) from pg_replication_slots where not active"
            )

    def close(self) -> None:
        """Leave no process behind."""
        for server in (self.standby, self.primary):
            server.close()

    def _standby_is(self, state: str, *, sync: bool = False) -> bool:
        with psycopg.connect(self.primary.dsn) as conn:
            rows = conn.execute("select state, sync_state from pg_stat_replication").fetchall()
        return any(s == state and (not sync or y == "sync") for s, y in rows)

    def _commits_wait_for(self, names: str) -> None:
        with psycopg.connect(self.primary.dsn, autocommit=True) as conn:
            conn.execute(f"alter system set synchronous_standby_names = '{names}'")
            conn.execute("select pg_reload_conf()")


def dsn_of(*ports: int, dbname: str = "postgres") -> str:
    """Return a DSN that finds the server which takes writes, among several."""
    return make_conninfo(
        host=",".join("127.0.0.1" for _ in ports),
        port=",".join(map(str, ports)),
        user="postgres",
        dbname=dbname,
        connect_timeout=2,
        **({"target_session_attrs": "read-write"} if len(ports) > 1 else {}),
    )


class Folder:
    """A folder in which the server's user may write, removed afterwards."""

    def __enter__(self) -> Path:
        self._path = Path(tempfile.mkdtemp(prefix="leasetask-faults-"))
        self._path.chmod(0o755)
        if (user := server_user()) is not None:
            shutil.chown(self._path, user)
        return self._path

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


@contextmanager
def one_server() -> Iterator[Server]:
    """Give a running server."""
    with Folder() as folder:
        server = Server(folder)
        try:
            server.create()
            server.start()
            yield server
        finally:
            server.close()


@contextmanager
def a_pair() -> Iterator[Pair]:
    """Give a running pair."""
    with Folder() as folder:
        pair = Pair(folder)
        try:
            yield pair
        finally:
            pair.close()


def _children_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in children.read_text().split()] if children.exists() else []


def _lives(pid: int) -> bool:
    try:
        state: Any = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return bool(state != "Z")


def wait_for_server(dsn: str, seconds: float = 30.0) -> float:
    """Wait until a write is taken; returns when that was, by the monotonic clock."""

    def takes_writes() -> bool:
        try:
            with psycopg.connect(dsn, connect_timeout=2, autocommit=True) as conn:
                return conn.execute("select not pg_is_in_recovery()").fetchone() == (True,)
        except psycopg.Error:
            return False

    wait_until(takes_writes, seconds, "for the server to take writes")
    return time.monotonic()
