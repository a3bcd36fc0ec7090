"""What `leasetask demo` needs around it: files, a folder, a server, a schema, and workers."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from leasetask import _keeper, demo_worker, embedded, schema
from leasetask.connection import connect, first
from leasetask.errors import ConfigurationError, WorkerError

Connection = psycopg.Connection[Any]

LEASE = 2.0
WORKERS = 2
SLOTS = 8
"""Tasks at a time in each worker."""

POLL = 0.05
"""Seconds between looks."""

_LONGEST_KEY = 1000
_ROOM = 2**28
"""Bytes that the server may need beside the copies."""

_GRACE = 5
_SERVER_STOP = 20
_LOG_LINES = 15


@dataclass
class Site:
    """Where one demo lives, and under which name: its kind's, and its schema's in the database."""

    folder: Path
    name: str
    dsn: str
    lost_owners: list[str] = field(default_factory=list)

    @property
    def copies(self) -> Path:
        """Where the files are copied to."""
        return self.folder / "copies"

    @property
    def ledger(self) -> Path:
        """One line for each step body that began."""
        return self.folder / "ledger"

    @property
    def log(self) -> Path:
        """What the workers print."""
        return self.folder / "worker.log"

    def print_log(self) -> None:
        """Print the log's last lines."""
        if self.log.exists():
            lines = self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            print("the workers' last words:", *lines, sep="\n  ")


def find_files(folder: Path, *, skip_installed: bool) -> list[str]:
    """Return the relative names of a folder's files.

    Raises:
        ConfigurationError: there are none, or more than the disk can take.
    """
    sizes: dict[str, int] = {}
    left_out = 0
    for place, folders, here in os.walk(folder):
        if skip_installed:
            folders[:] = [name for name in folders if name not in ("__pycache__", "site-packages")]
        for path in (Path(place, name) for name in here):
            if skip_installed and path.suffix == ".pyc":
                continue
            name = str(path.relative_to(folder))
            size = _size_of(path, name)
            if size is None:
                left_out += 1
            else:
                sizes[name] = size
    if not sizes:
        raise ConfigurationError(f"no files to copy in {folder}")
    total, scratch = sum(sizes.values()), tempfile.gettempdir()
    if total + _ROOM > shutil.disk_usage(scratch).free:
        raise ConfigurationError(
            f"the {total / 1e9:,.1f} GB in {folder} do not fit into {scratch}: "
            "name a smaller folder, or another place for temporary files in TMPDIR"
        )
    more = f" ({left_out:,} unreadable, left out)" if left_out else ""
    print(f"{len(sizes):,} files, {total / 1e6:,.0f} MB, in {folder}{more}", flush=True)
    return sorted(sizes)


def _size_of(path: Path, name: str) -> int | None:
    """Return a file's size; None if it cannot be read, or its name cannot be a task's key."""
    encoded = name.encode(errors="replace")
    if encoded.decode() != name or len(encoded) > _LONGEST_KEY:
        return None
    try:
        return path.stat().st_size if path.is_file() and os.access(path, os.R_OK) else None
    except OSError:
        return None


@contextmanager
def interrupted_once() -> Iterator[None]:
    """Let the first SIGINT or SIGTERM unwind what is inside, and no second one disturb that."""
    caught = (signal.SIGINT, signal.SIGTERM)

    def interrupt(*_: object) -> None:
        for number in caught:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def open_site(dsn: str | None, *, keep: bool) -> Iterator[Site]:
    """Make the demo's folder and schema; take both away again, unless told to keep them.

    Args:
        dsn: the database to use; None: an embedded server in the demo's folder.
    """
    with ExitStack() as cleanup:
        folder = Path(tempfile.mkdtemp(prefix="leasetask-demo-"))
        if not keep:
            cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        if os.geteuid() == 0:
            folder.chmod(0o711)  # the server runs as somebody else then, who has to pass through
        server = dsn
        if server is None:
            cleanup.callback(_stop_server, folder / "server")
            server = embedded.ensure(folder / "server")
        schema.migrate(server)
        name = f"leasetask_demo_{secrets.token_hex(4)}"
        options = f"{conninfo_to_dict(server).get('options') or ''} -c search_path={name}"
        site = Site(folder, name, make_conninfo(server, options=options.strip()))
        site.copies.mkdir(mode=0o700)
        if not keep:
            cleanup.callback(_clean_database, site)
        yield site


def _stop_server(folder: Path) -> None:
    """Leave the embedded server, and wait until its last process has let go of the lock."""
    embedded.release(folder)
    deadline = time.monotonic() + _SERVER_STOP
    while (folder / _keeper.LOCK).exists() and time.monotonic() < deadline:
        with (folder / _keeper.LOCK).open() as lock, suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(POLL)


def _clean_database(site: Site) -> None:
    """Take what the demo wrote out of the database, which may be somebody's own."""
    with connect(site.dsn) as conn:
        conn.execute(sql.SQL("drop schema if exists {} cascade").format(sql.Identifier(site.name)))
        conn.execute("delete from leasetask.task where kind = %s", (site.name,))
        conn.execute("delete from leasetask.kind where kind = %s", (site.name,))
        conn.execute("delete from leasetask.lost_owner where owner = any(%s)", (site.lost_owners,))
        conn.execute("delete from leasetask.idle_worker where owner = any(%s)", (site.lost_owners,))


@dataclass
class Kill:
    """A worker's end: when, by the server's clock, and the tasks that it held."""

    pid: int
    at: datetime
    held: list[str]


class Fleet:
    """The worker processes of a demo; a context manager that leaves none behind.

    Args:
        slots: tasks at a time in each.
        pause: seconds by which each step is slowed down.
    """

    def __init__(self, site: Site, slots: int, pause: float) -> None:
        self._site = site
        self._slots = slots
        self._workers: list[subprocess.Popen[bytes]] = []
        self._stdin, self._lifeline = os.pipe()  # the workers end when we do: theirs closes then
        self._environment = {
            **os.environ,
            "LEASETASK_DSN": site.dsn,
            demo_worker.KIND: site.name,
            demo_worker.LEDGER: str(site.ledger),
            demo_worker.PAUSE: str(pause),
        }

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            try:
                worker.wait(_GRACE + 5)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        os.close(self._stdin)
        os.close(self._lifeline)

    def start(self) -> int:
        """Start a worker as a user would, in a process of its own; return its pid."""
        command = [sys.executable, "-m", "leasetask", "worker", "leasetask.demo_worker:app"]
        command += [
            "--concurrency",
            str(self._slots),
            "--lease",
            str(LEASE),
            "--grace",
            str(_GRACE),
        ]
        with self._site.log.open("ab") as log:
            worker = subprocess.Popen(
                command,
                env=self._environment,
                stdin=self._stdin,
                stdout=log,
                stderr=log,
                process_group=0,  # Ctrl-C is for us; we end the workers
            )
        self._workers.append(worker)
        return worker.pid

    def kill_one(self, conn: Connection) -> Kill | None:
        """Kill a worker in the middle of its tasks with SIGKILL; None if none has any just now."""
        for worker in self._workers:
            worker.send_signal(signal.SIGSTOP)  # so that it still holds what we see when it dies
            held = conn.execute(
                "select id, lease_owner from leasetask.task where kind = %s and status = 'running'"
                " and split_part(lease_owner, ':', 2) = %s",
                (self._site.name, str(worker.pid)),
            ).fetchall()
            if held:
                worker.kill()
                worker.wait()
                self._workers.remove(worker)
                self._site.lost_owners.append(held[0][1])
                now = first(conn.execute("select clock_timestamp()").fetchall())
                return Kill(worker.pid, now, [id_ for id_, _ in held])
            worker.send_signal(signal.SIGCONT)
        return None

    def check(self) -> None:
        """Raise if a worker has ended by itself.

        Raises:
            WorkerError: one has.
        """
        for worker in self._workers:
            if (status := worker.poll()) is not None:
                raise WorkerError(f"worker {worker.pid} ended by itself, exit status {status}")
