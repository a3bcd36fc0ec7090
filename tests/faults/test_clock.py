"""H41: the worker's own clock is wrong; only the server's is ever compared with a lease or due time."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import psycopg
import pytest
from support import Fleet, column, enqueue, wait_for_end


def faketime_library() -> str:
    """Return the library that changes a process's clock; skips where it is not installed."""
    program = shutil.which("faketime")
    if program is None:
        pytest.skip("faketime is not installed")
    said = subprocess.run(
        [program, "-m", "-f", "+0", "sh", "-c", "echo $LD_PRELOAD"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return said.stdout.strip()


@pytest.mark.parametrize("offset", ["+600", "-600"])
def test_h41_a_worker_ten_minutes_off(
    dsn: str, db: psycopg.Connection, tmp_path: Path, offset: str
) -> None:
    """Nothing is claimed before it is due, no lease is taken for expired, nothing waits for long."""
    wrong = {
        "LD_PRELOAD": faketime_library(),
        "FAKETIME": offset,
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    with Fleet(dsn, tmp_path) as fleet:
        fleet.start("outage", "--poll", "0.1", lease=1.0, **wrong)
        lasts = enqueue(db, "lasts")
        fleet.ledger.wait_for("lasts: begins")
        right = fleet.start("outage", "--poll", "0.1", lease=1.0)
        asked = time.monotonic()
        enqueue(db, "quick", 1, delay=1.5)
        began = fleet.ledger.wait_for("quick 1").at
        assert 1.5 <= began - asked < 3.5
        fleet.gate("go").touch()
        assert wait_for_end(db) == {"succeeded": 2}
        assert column(db, "runs", lasts) == 1, "swept from under a live worker"
        assert not right.ended()
