"""The pytest plugin as a user meets it, and what is needed to import what."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

pytest_plugins = ["pytester"]

USERS_TESTS = """
import psycopg, pytest
from leasetask import App, Context

app = App("postgresql://localhost/not-used")

@app.task
def nap(ctx: Context, seconds: float) -> str:
    ctx.sleep(seconds)
    return "rested"

@pytest.mark.parametrize("number", range(6))
def test_each_has_a_database_of_its_own(leasetask_engine, leasetask_db, number):
    engine = leasetask_engine(app)
    task = engine.enqueue(nap, 3600.0, key="the same")
    assert task.outcome == "new"
    engine.drain()
    engine.advance(hours=1)
    engine.drain()
    assert engine.result(task) == "rested"
    with psycopg.connect(leasetask_db) as db, open("seen", "a") as seen:
        print(db.info.dbname, file=seen)

def test_a_database_is_migrated_and_empty(leasetask_db, leasetask_databases):
    with open("seen", "a") as seen:
        print(leasetask_databases._template, file=seen)
    with psycopg.connect(leasetask_db) as db:
        assert db.execute("select count(*) from leasetask.task").fetchone() == (0,)

def test_what_crash_anywhere_needs_is_on_the_same_server(leasetask_databases):
    from leasetask.testing.server import scratch_database
    with scratch_database(None) as dsn, psycopg.connect(dsn) as db:
        assert db.info.dbname.startswith("leasetask_test_")
"""


def test_a_users_tests_run_in_parallel_on_the_fixtures(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, leasetask_db: str
) -> None:
    monkeypatch.setenv("LEASETASK_TEST_DSN", leasetask_db)
    pytester.makepyfile(USERS_TESTS)
    done = pytester.runpytest_subprocess("-W", "error", "-p", "no:cacheprovider", "-n", "2")
    done.assert_outcomes(passed=8)
    names = (pytester.path / "seen").read_text().split()
    assert len(set(names)) == len(names) == 7
    with psycopg.connect(leasetask_db) as db:
        left = db.execute("select datname from pg_database where datname = any (%s)", [names])
        assert left.fetchall() == [], "each is dropped, and the templates too"


@pytest.mark.parametrize(
    ("module", "missing"),
    [
        ("leasetask", "hypothesis pytest"),
        ("leasetask.cli", "hypothesis pytest"),
        ("leasetask.testing", "hypothesis pytest"),
        ("leasetask.testing.plugin", "hypothesis"),
        ("leasetask.testing.strategies", "pytest"),
    ],
)
def test_hypothesis_and_pytest_are_needed_only_by_their_own_parts(
    module: str, missing: str, tmp_path: Path
) -> None:
    code = f"import sys; sys.modules.update(dict.fromkeys({missing!r}.split())); import {module}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_importing_leasetask_imports_neither(tmp_path: Path) -> None:
    code = (
        "import sys, leasetask; "
        "print([m for m in ('hypothesis', 'pytest', 'leasetask.testing') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
