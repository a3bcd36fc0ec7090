"""What the `leasetask` command says to mistakes: one line, the right status, no traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
from click.testing import CliRunner
from psycopg.conninfo import make_conninfo
from support import APPS, COMMAND, column, enqueue, wait_for_end, wait_until

from leasetask.cli import cli

Db = psycopg.Connection[Any]
DONE, REFUSED, USAGE, NO_SERVER = 0, 1, 2, 3
NOBODY = str(uuid.uuid4())
WORKER = ("worker", f"{APPS / 'noop'}.py:app")


class Mistake(NamedTuple):
    """A command, what it exits with, and what its one line says."""

    args: tuple[str, ...]
    status: int
    says: str


def run(dsn: str | None, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the real command; without a DSN there is none in its environment either."""
    env = {k: v for k, v in os.environ.items() if k != "LEASETASK_DSN"}
    env |= {"LEDGER": str(folder / "ledger")} | ({} if dsn is None else {"LEASETASK_DSN": dsn})
    return subprocess.run(
        ["timeout", "20", COMMAND, *args],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        errors="surrogateescape",
    )


def check_all(dsn: str | None, folder: Path, mistakes: list[Mistake]) -> None:
    """Run them two at a time; each tells one line on stderr, and nothing on stdout."""
    with ThreadPoolExecutor(2) as pool:
        ran = list(pool.map(lambda mistake: run(dsn, folder, *mistake.args), mistakes))
    wrong = [
        f"{mistake.args}: {result.returncode}, not {mistake.status}\n{result.stdout}{result.stderr}"
        for mistake, result in zip(mistakes, ran, strict=True)
        if (result.returncode, result.stdout) != (mistake.status, "")
        or not is_one_line(result.stderr)
        or mistake.says not in result.stderr
    ]
    assert not wrong, "\n".join(wrong)


def is_one_line(text: str) -> bool:
    """One line of the command's own."""
    return text.startswith("leasetask: ") and text.count("\n") == 1 and "Traceback" not in text


# --- the server and the schema -------------------------------------------------------------------


def on_server(status: int, says: str) -> list[Mistake]:
    """Every command that talks to the server."""
    commands: list[tuple[str, ...]] = [
        ("sweep",),
        ("enqueue", "noop", "1"),
        ("signal", "topic"),
        ("signal", "topic", "--clear"),
        ("cancel", NOBODY),
        ("retry", NOBODY),
        ("show", NOBODY),
        WORKER,
    ]
    return [Mistake(command, status, says) for command in commands]


def test_no_server(tmp_path: Path) -> None:
    """Must show (d): nobody listens there: status 3, and where that was."""
    dsn = "postgresql://postgres@127.0.0.1:1/nowhere"
    mistakes = on_server(NO_SERVER, "port=1")
    check_all(dsn, tmp_path, [*mistakes, Mistake(("migrate",), NO_SERVER, "port=1")])


def test_a_wrong_dsn(dsn: str, tmp_path: Path) -> None:
    """Must show (d): unreadable, no such host, user or database: status 3; no password shown."""
    args = ("sweep", "--dsn")
    no_user = make_conninfo(dsn, user="nobody_here", password="secret-word")
    no_database = make_conninfo(dsn, dbname="no_such_database")
    mistakes = [
        Mistake((*args, "this is no dsn"), NO_SERVER, "unreadable DSN"),
        Mistake((*args, "postgresql://[::1/x"), NO_SERVER, "unreadable DSN"),
        Mistake((*args, "host=no-such-host.invalid"), NO_SERVER, "no-such-host.invalid"),
        Mistake((*args, no_user), NO_SERVER, "nobody_here"),
        Mistake((*args, no_database), NO_SERVER, "no_such_database"),
        Mistake((*WORKER, "--dsn", no_database), NO_SERVER, "no_such_database"),
        Mistake(("migrate", "--dsn", no_database), NO_SERVER, "no_such_database"),
    ]
    check_all(None, tmp_path, mistakes)
    assert "secret-word" not in run(None, tmp_path, *args, no_user).stderr


def test_a_chore_without_a_dsn(tmp_path: Path) -> None:
    """`sweep` and `migrate` from a cron without its environment start no server of their own."""
    mistakes = [Mistake((name,), NO_SERVER, "LEASETASK_DSN") for name in ("sweep", "migrate")]
    check_all(None, tmp_path, mistakes)


def test_no_schema(empty_dsn: str, tmp_path: Path) -> None:
    """Must show (d): status 1, and the command that mends it."""
    check_all(empty_dsn, tmp_path, on_server(REFUSED, "leasetask migrate"))


@pytest.mark.parametrize(("version", "mend"), [(0, "leasetask migrate"), (99, "--upgrade")])
def test_another_schema(dsn: str, db: Db, tmp_path: Path, version: int, mend: str) -> None:
    """Must show (d), H36: older and newer: worker and sweep do nothing and say what mends it."""
    db.execute("update leasetask.schema_version set version = %s", [version])
    task = enqueue(db, "noop", 1)
    says = f"schema version {version}"
    check_all(dsn, tmp_path, [Mistake(("sweep",), REFUSED, says), Mistake(WORKER, REFUSED, mend)])
    assert column(db, "runs", task) == 0
    if version == 99:
        check_all(dsn, tmp_path, [Mistake(("migrate",), REFUSED, mend)])


# --- what is passed ------------------------------------------------------------------------------


def test_bad_input(dsn: str, db: Db, tmp_path: Path) -> None:
    """Must show (d): bad JSON, values that JSON cannot hold, too large, not a uuid, no moment.

    Status 2, and nothing is written.
    """
    enqueue_ = ("enqueue", "noop")
    mistakes = [
        Mistake((*enqueue_, "{bad"), USAGE, "not JSON"),
        Mistake((*enqueue_, "[" * 60_000), USAGE, "not JSON"),
        Mistake((*enqueue_, "NaN"), USAGE, "nan"),
        Mistake((*enqueue_, '{"a": [1, Infinity]}'), USAGE, "a[1]"),
        Mistake((*enqueue_, '{"a": ["x\\u0000y"]}'), USAGE, "a[0]"),
        Mistake((*enqueue_, '{"a": "\\ud800"}'), USAGE, "a"),
        Mistake((*enqueue_, '"\udcff"'), USAGE, "input of noop"),
        Mistake((*enqueue_, "1", "--key", ""), USAGE, "key"),
        Mistake((*enqueue_, "1", "--key", "k" * 1001), USAGE, "1001"),
        Mistake((*enqueue_, "1", "--at", "tomorrow"), USAGE, "tomorrow"),
        Mistake((*enqueue_, "1", "--at", "2030-01-01T00:00:00"), USAGE, "zone"),
        Mistake((*enqueue_, "1", "--delay", "nan"), USAGE, "delay"),
        Mistake((*enqueue_, "1", "--delay", "inf"), USAGE, "delay"),
        Mistake((*enqueue_, "1", "--delay", "1", "--at", "2030-01-01T00:00:00Z"), USAGE, "both"),
        Mistake(("enqueue", "", "1"), USAGE, "kind"),
        Mistake(("signal", "topic", "{bad"), USAGE, "not JSON"),
        Mistake(("cancel", "not-a-uuid"), USAGE, "not-a-uuid"),
        Mistake(("show", "not-a-uuid"), USAGE, "not-a-uuid"),
    ]
    check_all(dsn, tmp_path, mistakes)
    assert db.execute("select count(*) from leasetask.task").fetchone() == (0,)
    assert db.execute("select count(*) from leasetask.task_signal").fetchone() == (0,)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("retry", NOBODY, "--dry-run"), "go with --all"),
        (("stats", "--period", "0"), "--period"),
        (("list", "--key", "k"), "--key goes with --kind"),
        (("prune", "--batch", "0"), "--batch"),
    ],
)
def test_options_that_make_no_sense(args: tuple[str, ...], says: str) -> None:
    """In this process: what click itself refuses comes before any server is asked."""
    result = CliRunner().invoke(cli, args)
    assert result.exit_code == USAGE
    assert says in result.stderr


def test_what_is_not_there(dsn: str, db: Db, tmp_path: Path) -> None:
    """Must show (d): an unknown id, a task in another state, a key with another input: status 1."""
    task = enqueue(db, "noop", 1, key="taken")
    check_all(
        dsn,
        tmp_path,
        [
            Mistake(("cancel", NOBODY), REFUSED, NOBODY),
            Mistake(("show", NOBODY), REFUSED, NOBODY),
            Mistake(("retry", task), REFUSED, "pending"),
            Mistake(("enqueue", "noop", "2", "--key", "taken"), REFUSED, task),
        ],
    )


def test_an_unknown_kind_is_accepted_with_a_warning(dsn: str, db: Db, tmp_path: Path) -> None:
    """Must show (d): a worker may declare it later; status 0, one line of warning."""
    result = run(dsn, tmp_path, "enqueue", "unheard-of", '{"id": 1}', "--json")
    assert result.returncode == DONE
    assert is_one_line(result.stderr)
    assert "unheard-of" in result.stderr
    made = json.loads(result.stdout)
    assert made["outcome"] == "new"
    assert column(db, "kind", made["id"]) == "unheard-of"


def test_usage(tmp_path: Path) -> None:
    """What the command line itself does not understand: status 2 and no traceback."""
    for args in (("nonsense",), ("sweep", "--nonsense"), ("enqueue",), ("enqueue", "k", "1", "2")):
        result = run(None, tmp_path, *args)
        assert (result.returncode, result.stdout) == (USAGE, "")
        assert "Traceback" not in result.stderr
        assert "Error: " in result.stderr


# --- the worker's App ----------------------------------------------------------------------------

MODULES = {
    "raises.py": "raise RuntimeError('two\\nlines')\n",
    "syntax.py": "def broken(:\n",
    "imports.py": "import no_such_module_anywhere\n",
    "leaves.py": "import sys\nsys.exit(7)\n",
    "other.py": "app = object()\n",
    "twice.py": """
from leasetask import App
app = App()
@app.task(kind="same")
def one(ctx): pass
@app.task(kind="same")
def two(ctx): pass
""",
    "wrong.py": """
from leasetask import App
app = App()
@app.task
def handler(): pass
""",
}


@pytest.fixture
def modules(tmp_path: Path) -> Iterator[Path]:
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text)
    yield tmp_path


def test_a_spec_that_cannot_be_imported(dsn: str, modules: Path) -> None:
    """Must show (d): no module, no attribute, no App, a module that raises: status 2, one line."""
    says = {
        "no_such_module:app": "no_such_module",
        "no_such_package.tasks:app": "no_such_package.tasks",
        "json.no_such_part:app": "json.no_such_part",
        "no-such-file.py:app": "no-such-file.py",
        "other:app": "other",
        "other": "other",
        "other:missing": "missing",
        "other:": "other",
        ":app": ":app",
        "": "MODULE",
        "..relative:app": "..relative",
        ".:app": ".",
        "raises:app": "RuntimeError",
        "syntax.py:app": "syntax.py",
        "imports:app": "no_such_module_anywhere",
        "leaves:app": "leaves",
        "twice:app": "same",
        "wrong:app": "handler",
    }
    check_all(dsn, modules, [Mistake(("worker", spec), USAGE, says[spec]) for spec in says])


def test_a_workers_options(dsn: str, tmp_path: Path) -> None:
    """Numbers and names that cannot work: status 2, one line."""
    options = {
        "--concurrency=0": "concurrency",
        "--lease=0.1": "lease",
        "--lease=nan": "lease",
        "--lease=inf": "lease",
        "--poll=nan": "poll",
        "--grace=-1": "grace",
        "--grace=nan": "grace",
        "--log-level=loud": "none of debug, info, warning, error",
    }
    mistakes = [Mistake((*WORKER, option), USAGE, says) for option, says in options.items()]
    check_all(dsn, tmp_path, mistakes)


# --- a worker and bad tasks ----------------------------------------------------------------------


def test_an_input_that_does_not_fit_its_handler(dsn: str, db: Db, tmp_path: Path) -> None:
    """Must show (d): enqueued from outside it ends failed, `show` tells why, the worker lives."""
    bad = run(dsn, tmp_path, "enqueue", "noop", '"text"', "--json")
    good = run(dsn, tmp_path, "enqueue", "noop", "7", "--json")
    ids = [json.loads(result.stdout)["id"] for result in (bad, good)]
    env = {**os.environ, "LEASETASK_DSN": dsn, "LEDGER": str(tmp_path / "ledger")}
    with subprocess.Popen([COMMAND, *WORKER], env=env, stderr=subprocess.PIPE, text=True) as worker:
        try:
            assert wait_for_end(db) == {"failed": 1, "succeeded": 1}
            wait_until(lambda: column(db, "status", ids[1]) == "succeeded")
        finally:
            worker.send_signal(signal.SIGTERM)
            _, log = worker.communicate(timeout=30)
    assert worker.returncode == DONE
    assert "Traceback" not in log
    assert ids[0] in log
    shown = run(dsn, tmp_path, "show", ids[0])
    assert (shown.returncode, shown.stderr) == (DONE, "")
    assert "PayloadError" in shown.stdout
    again = run(dsn, tmp_path, "retry", ids[0])
    assert (again.returncode, again.stderr) == (DONE, "")


def test_what_is_done_exits_with_0(dsn: str, db: Db, tmp_path: Path) -> None:
    """Done is 0, with nothing on stderr."""
    task = enqueue(db, "noop", 1)
    for args in (("migrate",), ("sweep",), ("show", task), ("signal", "t", "1"), ("cancel", task)):
        result = run(dsn, tmp_path, *args)
        assert (result.returncode, result.stderr) == (DONE, ""), args
        assert result.stdout
    again = run(dsn, tmp_path, "cancel", task)
    assert again.returncode == REFUSED
