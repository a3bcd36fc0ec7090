"""An engine under test: what it promises, and its adapter's processes.

An adapter is a program in `bench/engines` that runs in the engine's own environment and knows these
commands: `setup`, `enqueue KIND N`, `single KIND N`, `paced KIND N SECONDS`, `signal N SECONDS` and
`work`. It prints its answer as JSON. Its handlers note what happens in the file BENCH_MARKS, by the
machine's monotonic clock, which is the same for every process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psycopg

ADAPTERS = Path(__file__).parent / "engines"


@dataclass(frozen=True)
class Contract:
    """What an engine promises, so that unlike things are not ranked as if they were alike."""

    fenced: str
    history: str
    steps: str
    recovery: str


@dataclass(frozen=True)
class Engine:
    """One engine.

    Attributes:
        adapter: the file in `bench/engines`.
        left: SQL that counts the tasks not done yet; asked only whether there are any.
        able: the workloads it can run.
        settings: those of the adapter that matter, in a line.
        packages: what its environment holds; with `runtime` it is made by `environments`.
        reference: what the speed issue's table says it reaches, by workload.
        variables: for the adapter's environment.
    """

    name: str
    adapter: str
    left: str
    able: frozenset[str]
    settings: str
    contract: Contract
    packages: tuple[str, ...] = ()
    runtime: str = "python"
    reference: dict[str, float] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)


class Adapter:
    """An engine's adapter on one database."""

    def __init__(self, engine: Engine, interpreter: Sequence[str], dsn: str) -> None:
        self.engine = engine
        self._folder = tempfile.TemporaryDirectory(prefix="leasetask-bench-marks-")
        self._marks = Path(self._folder.name) / "marks"
        self._marks.touch()
        self._command = [*interpreter, str(ADAPTERS / engine.adapter)]
        parts = psycopg.conninfo.conninfo_to_dict(dsn)
        host, user, name = (str(parts[key]) for key in ("host", "user", "dbname"))
        self._env = {
            **os.environ,
            "BENCH_DSN": f"postgresql://{user}@/{name}?host={host}",
            "BENCH_MARKS": str(self._marks),
            "PGHOST": host,
            "PGUSER": user,
            "PGDATABASE": name,
            "NODE_ENV": "production",
            **engine.variables,
        }
        self.conn = psycopg.connect(
            dsn, autocommit=True, prepare_threshold=None, application_name="bench"
        )

    def ask(self, *arguments: object) -> Any:
        """Run a command of the adapter to its end and return its answer."""
        done = subprocess.run(
            [*self._command, *map(str, arguments)],
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=600,
        )
        if done.returncode != 0:
            raise AdapterFailed(f"{self.engine.name} {arguments}: {done.stderr.strip()[-800:]}")
        answer = done.stdout.strip().splitlines()
        return json.loads(answer[-1]) if answer else None

    def start(self, **variables: str) -> WorkerProcess:
        """Start a worker process."""
        return WorkerProcess([*self._command, "work"], {**self._env, **variables})

    def tasks_left(self) -> int:
        """Return 0 once all tasks are done; looked at often, so at no more than there is to see."""
        left = self.engine.left.replace("count(*)", "1", 1)
        row = self.conn.execute(f"/* observer */ select exists ({left})::int").fetchone()
        assert row is not None
        return int(row[0])

    def marks(self, word: str) -> list[tuple[int, float]]:
        """Return (number, time) of every mark with this word."""
        lines = [line.split(" ") for line in self._marks.read_text().splitlines()]
        return [(int(n), float(at)) for w, n, at in lines if w == word]

    def forget_marks(self) -> None:
        """Begin with an empty file of marks."""
        self._marks.write_text("")

    def __enter__(self) -> Adapter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.conn.close()
        self._folder.cleanup()


class AdapterFailed(Exception):
    """An engine's adapter ended with an error: this engine is left out of the workload."""


class WorkerProcess:
    """A worker of an engine; leaving its block ends it."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            command, env=env, stdout=self._log, stderr=self._log, start_new_session=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def check_alive(self) -> None:
        """Raise AdapterFailed with the end of its log if it has ended."""
        if self._process.poll() is not None:
            self._log.seek(0)
            text = self._log.read().decode(errors="replace")
            raise AdapterFailed(f"the worker ended: {text.strip()[-800:]}")

    def kill(self) -> None:
        """SIGKILL to it and its children, and wait until it is gone."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Let it end by itself for two seconds, then kill it."""
        self._process.terminate()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self.kill()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self.stop()
        self._log.close()
