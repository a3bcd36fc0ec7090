"""Real workers, killed while they write to the business and act outside.

The judge reads the business table, the torrent client and the ledger only, never the engine's status.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import psycopg
import pytest
from conftest import SOAK
from support import APPS, Ledger, Nursery, enqueue, is_alive, wait_for_end, wait_until

KILLS = 1000 if SOAK else 50
FRESH = 3
"""New tasks for each worker: what the one before held may be leased, or suspect, for a while."""


@pytest.fixture
def torrents() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, str(APPS / "torrents.py")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    process.kill()
    process.wait()
    process.stdout.close()


def killed_again_and_again(
    dsn: str,
    db: psycopg.Connection,
    ledger: Ledger,
    kind: str,
    values: Sequence[object],
    seed: int,
    torrents: str = "",
) -> None:
    """Run tasks in workers that die a few milliseconds after they begin their first."""
    chance = random.Random(seed)
    nursery = Nursery(dsn, ledger.path, torrents)
    waiting = list(values)
    try:
        for _ in range(KILLS):
            for _ in range(FRESH):
                enqueue(db, kind, waiting.pop(), max_attempts=20)
            worker = nursery.fork(chance.uniform(0.0005, 0.03), "-c", "4", "--lease", "0.5")
            wait_until(lambda worker=worker: not is_alive(worker), 30, "for a worker to die")
        last = nursery.fork(0, "--lease", "1")
        # Tasks that were there in two deaths are suspects, which run one after another.
        wait_for_end(db, 900 if SOAK else 60)
        os.kill(last, signal.SIGTERM)
        wait_until(lambda: not is_alive(last), 10, "for the last worker to end")
    finally:
        nursery.close()


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


def test_a_business_row_is_there_once_and_only_once(
    dsn: str, db: psycopg.Connection, ledger: Ledger
) -> None:
    """kill -9 at random points around three business commits a task, the last the task's own end."""
    db.execute("create table business (task int, what text)")
    orders = list(range(KILLS * FRESH))
    killed_again_and_again(dsn, db, ledger, "pay", orders, seed=1)
    rows = db.execute("select task, what from business").fetchall()
    assert Counter(rows) == {(o, w): 1 for o in orders for w in ("reserved", "paid", "shipped")}


def test_a_torrent_is_added_exactly_once(
    dsn: str, db: psycopg.Connection, ledger: Ledger, torrents: str
) -> None:
    """An effect with an honest reconcile: `do` never runs a second time before it was asked."""
    names = [f"t{i}" for i in range(KILLS * FRESH)]
    killed_again_and_again(dsn, db, ledger, "download", names, 2, torrents)
    with urllib.request.urlopen(f"{torrents}/list") as answer:
        assert Counter(json.load(answer)) == dict.fromkeys(names, 1)
    asked: dict[str, int] = {}
    for line in ledger.path.read_text().splitlines():
        what, name, number = line.split()
        if what == "reconcile":
            asked[name] = int(number)
        else:
            assert int(number) == 1 or asked.get(name, 0) >= int(number) - 1


def test_an_unknown_effect_waits_for_a_person_and_goes_on(
    dsn: str, db: psycopg.Connection, ledger: Ledger, torrents: str
) -> None:
    """Killed inside `do`, reconcile cannot tell: a dead letter, until `leasetask resolve`."""
    nursery = Nursery(dsn, ledger.path, torrents)
    try:
        task = enqueue(db, "unclear", "film")
        doomed = nursery.fork(0, "--lease", "0.5")
        wait_until(lambda: not is_alive(doomed), 20, "for the worker to kill itself")
        last = nursery.fork(0, "--lease", "0.5")
        assert wait_for_end(db) == {"failed": 1}
        resolve = [
            sys.executable,
            "-m",
            "leasetask",
            "resolve",
            task,
            "add",
            "--redo",
            "--dsn",
            dsn,
        ]
        done = subprocess.run(resolve, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert wait_for_end(db) == {"succeeded": 1}
        os.kill(last, signal.SIGTERM)
    finally:
        nursery.close()
