"""`leasetask demo`: copies a folder through the engine, kills a worker, and audits what came out.

The audit takes nothing from the engine alone: copies are hashed again on disk, business rows are
counted in their own table, and step bodies in a ledger that the workers keep beside the database.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from leasetask import _keeper, demo_worker, embedded, schema
from leasetask.app import App
from leasetask.connection import connect
from leasetask.demo_ingest import TABLE, Media, ingest
from leasetask.demo_ingest import app as example
from leasetask.demo_show import Show, open_show
from leasetask.errors import ConfigurationError, LeaseTaskError

LEASE = 2.0
WORKERS = 2
SLOTS = 8
"""Tasks at a time in each worker."""

POLL = 0.05
PATIENCE = 60.0
"""Seconds without a finished task after which the demo gives up."""

FEW = 300
"""Files below which the demo slows its steps down, to have a middle to kill in."""


@dataclass
class Site:
    """Where one demo lives.

    Attributes:
        name: of its kind, and of its schema in the database.
        dsn: leads to that schema, so that the example's table is found there.
        killed: the owners of the leases of killed workers.
    """

    folder: Path
    name: str
    dsn: str
    killed: list[str] = field(default_factory=list)

    @property
    def copies(self) -> Path:
        """Where the files are copied to."""
        return self.folder / "copies"

    @property
    def ledger(self) -> Path:
        """One line for each step body that began."""
        return self.folder / "ledger"

    @property
    def log(self) -> Path:
        """What the workers print."""
        return self.folder / "worker.log"


@dataclass
class Kill:
    """A worker's end, and what became of the tasks it held.

    Attributes:
        after, done: seconds and finished tasks when it came.
        at: the server's clock then.
        recovered_after: seconds until another worker claimed the first of them.
    """

    pid: int
    after: float
    done: int
    at: Any
    held: list[str]
    recovered_after: float | None = None


@dataclass
class Audit:
    """What came out."""

    files: int
    succeeded: int
    verified: int
    lost: int
    duplicated: int
    steps: int
    cut_off: int

    @property
    def passed(self) -> bool:
        """Whether every file is there once, and right."""
        return self.verified == self.files and not self.lost and not self.duplicated


def run_demo(folder: Path | None, dsn: str | None, *, keep: bool) -> int:
    """Run the demo and return its exit status; to be called in the main thread.

    Args:
        folder: whose files are copied; None: the Python standard library's own.
        dsn: the database; None: an embedded server of the demo's own.
        keep: leave copies, log, tables and tasks where they are.

    Raises:
        LeaseTaskError: it could not be set up, or it stood still.
    """
    source = (folder or Path(sysconfig.get_path("stdlib"))).resolve()
    files = find_files(source, skip_installed=folder is None)
    with interrupted_once(), open_site(dsn, keep=keep) as site, connect(site.dsn) as conn:
        try:
            with open_show(len(files)) as show:
                began = time.monotonic()
                enqueue(site, conn, source, files, show)
                kill = work(site, conn, len(files), show)
                seconds = time.monotonic() - began
            result = audit(site, conn, source, files)
        except (LeaseTaskError, psycopg.Error):
            show_trouble(site, ())
            raise
        report(result, kill, seconds)
        if not result.passed:
            show_trouble(site, failures(site, conn))
        return 0 if result.passed else 1
