"""What tests with real processes share: workers as subprocesses, a ledger outside the database."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psycopg

APPS = Path(__file__).parent / "apps"
COMMAND = Path(sysconfig.get_path("scripts")) / "leasetask"


def wait_until(condition: Callable[[], Any], seconds: float = 20.0, what: str = "") -> Any:
    """Return what the condition gives once it is true; fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s in vain {what}"
        time.sleep(0.01)
    return value


def pass_time(seconds: float) -> None:
    """Let time pass; nothing is waited for."""
    end = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > end, seconds + 1)


# --- tasks, through SQL ----------------------------------------------------------------------


def enqueue(
    db: psycopg.Connection[Any],
    kind: str,
    input: Any = None,
    *,
    key: str | None = None,
    delay: float = 0,
    priority: int = 0,
    version: int = 1,
    max_attempts: int = 5,
    backoff: float = 0.05,
    deadline: float | None = None,
) -> str:
    """Enqueue a task as any language would, without jitter, and return its id."""
    row = db.execute(
        "select id::text from leasetask.try_enqueue(%s, %s::jsonb, %s,"
        " delay => make_interval(secs => %s), priority => %s::smallint, version => %s::int,"
        " max_attempts => %s::int, backoff_initial => %s::real, backoff_jitter => 0::real,"
        " deadline => %s::float8)",
        [kind, json.dumps(input), key, delay, priority, version, max_attempts, backoff, deadline],
    ).fetchone()
    assert row is not None
    return str(row[0])


def column(db: psycopg.Connection[Any], name: str, task_id: str) -> Any:
    """Return one column of one task."""
    row = db.execute(f"select {name} from leasetask.task where id = %s", [task_id]).fetchone()
    assert row is not None
    return row[0]


def statuses(db: psycopg.Connection[Any]) -> dict[str, int]:
    """Count the tasks by status."""
    rows = db.execute("select status, count(*) from leasetask.task group by status")
    return dict(rows.fetchall())


def wait_for_status(
    db: psycopg.Connection[Any], task_id: str, status: str, seconds: float = 20.0
) -> None:
    """Wait until a task has a status."""
    wait_until(lambda: column(db, "status", task_id) == status, seconds, f"for {status}")


def wait_for_end(db: psycopg.Connection[Any], seconds: float = 20.0) -> dict[str, int]:
    """Wait until every task has ended and return their count by status."""
    query = "select not exists (select from leasetask.task where finished_at is null)"

    def ended() -> bool:
        row = db.execute(query).fetchone()
        return row is not None and bool(row[0])

    try:
        wait_until(ended, seconds, "for all tasks to end")
    except AssertionError as error:
        raise AssertionError(f"{error}: {statuses(db)}") from None
    return statuses(db)


# --- processes ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the ledger: when (the machine's monotonic clock), which process, what."""

    at: float
    pid: int
    what: str


class Ledger:
    """The file in which handlers note what they do, as it happens; see apps/ledger.py."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def entries(self, what: str | None = None) -> list[Entry]:
        """Return what was noted so far, or those entries that say exactly `what`."""
        lines = [line.split(" ", 2) for line in self.path.read_text().splitlines()]
        entries = [Entry(float(at), int(pid), text) for at, pid, text in lines]
        return [entry for entry in entries if what is None or entry.what == what]

    def count(self, what: str) -> int:
        """Count the entries that say exactly `what`."""
        return len(self.entries(what))

    def wait_for(self, what: str, times: int = 1, seconds: float = 20.0) -> Entry:
        """Wait until something was noted so many times, and return that entry."""
        wait_until(lambda: self.count(what) >= times, seconds, f"for {what!r} in the ledger")
        return self.entries(what)[times - 1]


class WorkerProcess:
    """A `leasetask worker` that a test has started."""

    def __init__(self, command: Sequence[str | Path], env: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command, env=env, stdout=out, stderr=out, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT; nothing happens to one that has ended."""
        self._process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        self._process.terminate()

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def wait(self, seconds: float = 20.0) -> int:
        """Return the exit status once it has ended by itself."""
        return self._process.wait(seconds)

    def clear_away(self) -> None:
        """End it, and the children it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Nursery:
    """Forks workers of an app, which may die when they are told to; see apps/nursery.py."""

    def __init__(self, dsn: str, ledger: Path, torrents: str, app: str = "business") -> None:
        environment = {"LEASETASK_DSN": dsn, "LEDGER": str(ledger), "TORRENTS": torrents}
        self._log = ledger.with_suffix(".log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(APPS / "nursery.py"), app],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            start_new_session=True,
        )

    def fork(self, kill_after: float, *options: str) -> int:
        """Start a worker that dies so many seconds after it began its first task (0: never)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{kill_after} {' '.join(options)}\n")
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """Start no more, and leave none behind, nor a child of theirs."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            assert stream is not None
            stream.close()


def is_alive(pid: int) -> bool:
    """Whether a process that is not our child is still there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Fleet:
    """The worker processes of one test, on one database, with one ledger."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self.folder = folder
        self.ledger = Ledger(folder / "ledger")
        self._env = {**os.environ, "LEASETASK_DSN": dsn, "LEDGER": str(self.ledger.path)}
        self._workers: list[WorkerProcess] = []

    def start(
        self, app: str, *options: str, lease: float = 1.0, **environment: str
    ) -> WorkerProcess:
        """Start a worker for the App in `apps/<app>.py`."""
        command = [COMMAND, "worker", f"{APPS / app}.py:app", "--lease", str(lease), *options]
        return self._run(command, **environment)

    def run(self, program: str) -> WorkerProcess:
        """Run `apps/<program>.py`, which starts its worker itself."""
        return self._run([sys.executable, APPS / f"{program}.py"])

    def _run(self, command: Sequence[str | Path], **environment: str) -> WorkerProcess:
        log = self.folder / f"worker-{len(self._workers)}.log"
        worker = WorkerProcess(command, {**self._env, **environment}, log)
        self._workers.append(worker)
        return worker

    def gate(self, name: str) -> Path:
        """Return the file that lets handlers pass `ledger.hold(name)` once it exists."""
        return Path(f"{self.ledger.path}.{name}")

    @property
    def logs(self) -> str:
        return "\n".join(worker.log for worker in self._workers)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.clear_away()
        print(self.logs)  # shown with a failure
