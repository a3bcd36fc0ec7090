"""`leasetask demo`: copies a folder through the engine, kills a worker, and audits what came out.

The audit takes nothing from the engine alone: copies are hashed again on disk, business rows are
counted in their own table, and step bodies in a ledger that the workers keep beside the database.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sysconfig
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg import sql

from leasetask.app import App
from leasetask.connection import connect, first
from leasetask.demo_ingest import TABLE, Media, ingest
from leasetask.demo_ingest import app as example
from leasetask.demo_show import Row, Show, open_show
from leasetask.demo_site import (
    LEASE,
    SLOTS,
    WORKERS,
    Connection,
    Fleet,
    Kill,
    Site,
    interrupted_once,
    open_site,
)
from leasetask.demo_worker import END
from leasetask.errors import ConfigurationError, LeaseTaskError, WorkerError

POLL = 0.05
PATIENCE = 60.0
"""Seconds without a finished task after which the demo gives up."""

FEW = 300
"""Fewer files than this are done in a moment: their steps pause, to have a middle to kill in."""

LONGEST_KEY = 1000
"""Bytes."""

STEPS = 4


@dataclass
class Story:
    """What happened: seconds are counted from the enqueue, `recovered_after` from the kill."""

    seconds: float = 0.0
    kill: Kill | None = None
    killed_after: float = 0.0
    done_before: int = 0
    recovered_after: float | None = None


@dataclass
class Audit:
    """What came out; `cut_off` counts step bodies that ran again as they had left no record."""

    files: int
    succeeded: int
    verified: int
    lost: int
    duplicated: int
    steps: int
    cut_off: int

    @property
    def passed(self) -> bool:
        """Whether every file is there, right, and once."""
        return self.verified == self.files and not self.lost and not self.duplicated


def run_demo(folder: Path | None, dsn: str | None, *, keep: bool) -> int:
    """Run the demo and return its exit status; to be called in the main thread.

    Args:
        folder: whose files are copied; None: the Python standard library's own.
        dsn: the database to use; None: an embedded server of the demo's own.
        keep: leave copies, log, tables and tasks where they are.

    Raises:
        LeaseTaskError: it could not be set up, or it stood still.
    """
    source = (folder or Path(sysconfig.get_path("stdlib"))).resolve()
    files = find_files(source, skip_installed=folder is None)
    with interrupted_once(), open_site(dsn, keep=keep) as site, connect(site.dsn) as conn:
        print(f"working in {site.folder}, " + ("kept" if keep else "removed at the end"))
        try:
            with open_show(len(files)) as show:
                story = ingest_all(site, conn, source, files, show)
            result = audit(site, conn, source, files)
            show.table(_rows(result, story))
            ...
        except (LeaseTaskError, psycopg.Error):
            print("the workers' last words:", *site.log_tail(), sep="\n  ")
            raise
        if not result.passed:
            ...
    return 0 if result.passed else 1


def find_files(folder: Path, *, skip_installed: bool) -> list[str]:
    """Return the relative names of a folder's files, as far as they can be read and named.

    Raises:
        ConfigurationError: there are none, or they are too many for the disk.
    """
    names, size, skipped = [], 0, 0
    for place, folders, here in os.walk(folder):
        if skip_installed:
            folders[:] = [name for name in folders if name not in ("__pycache__", "site-packages")]
            here = [name for name in here if not name.endswith(".pyc")]
        for path in (Path(place, name) for name in here):
            name = str(path.relative_to(folder))
            if _can_be_task(path, name):
                names.append(name)
                size += path.stat().st_size
            else:
                skipped += 1
    if not names:
        raise ConfigurationError(f"no files to copy in {folder}")
    scratch = tempfile.gettempdir()
    if size + 2**28 > shutil.disk_usage(scratch).free:
        raise ConfigurationError(
            f"the {size / 1e9:,.1f} GB in {folder} do not fit into {scratch}: "
            "name a smaller folder, or another place for temporary files in TMPDIR"
        )
    more = f" ({skipped:,} that cannot be read left out)" if skipped else ""
    print(f"{len(names):,} files, {size / 1e6:,.0f} MB, in {folder}{more}", flush=True)
    return sorted(names)


def _can_be_task(path: Path, name: str) -> bool:
    """Whether a file can be read, and its name be stored as text."""
    if not path.is_file() or not os.access(path, os.R_OK):
        return False
    encoded = name.encode(errors="replace")
    return encoded.decode() == name and len(encoded) <= LONGEST_KEY


# --- the run -----------------------------------------------------------------------------------


def ingest_all(site: Site, conn: Connection, source: Path, files: list[str], show: Show) -> Story:
    """Have every file ingested, with a worker killed on the way."""
    pause = min(0.5, 3.0 * WORKERS * SLOTS / STEPS / len(files)) if len(files) < FEW else 0.0
    began = time.monotonic()
    enqueue(site, conn, source, files)
    show.line(f"{len(files):,} tasks enqueued, in one transaction with their table")
    if pause:
        show.line(f"few files: each step takes {pause:.2f} s longer, so that there is a middle")
    with Fleet(site, pause) as fleet:
        for _ in range(WORKERS):
            show.line(f"worker {fleet.start()} started")
        return _watch(site, conn, fleet, len(files), show, began)
