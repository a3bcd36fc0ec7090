"""`leasetask demo`: copies a folder through the engine, kills a worker, and audits what came out.

The audit takes nothing from the engine alone: copies are hashed again on disk, business rows are
counted in their own table, and step bodies in a ledger that the workers keep beside the database.
"""

from __future__ import annotations

import hashlib
import sysconfig
import time
from dataclasses import dataclass, field
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
    POLL,
    SLOTS,
    WORKERS,
    Connection,
    Fleet,
    Kill,
    Site,
    find_files,
    interrupted_once,
    open_site,
)
from leasetask.demo_worker import END
from leasetask.errors import LeaseTaskError, WorkerError

PATIENCE = 60.0
"""Seconds without a finished task after which the demo gives up."""

FEW = 300
"""Fewer files than this would be done in a moment: their steps pause."""

SHOWN = 5
"""Troubles that are named."""


@dataclass
class Story:
    """What happened; seconds from the first worker's start, `recovered_after` from the kill."""

    seconds: float = 0.0
    kill: Kill | None = None
    killed_after: float = 0.0
    done_before: int = 0
    recovered_after: float | None = None


@dataclass
class Audit:
    """What came out; `cut_off` counts step bodies that ran again, having left no record."""

    files: int
    succeeded: int = 0
    verified: int = 0
    lost: int = 0
    duplicated: int = 0
    steps: int = 0
    cut_off: int = 0
    troubles: list[str] = field(default_factory=list)

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
        print(f"working in {site.folder}" + ("" if keep else ", removed at the end"), flush=True)
        try:
            with open_show(len(files)) as show:
                story = ingest_all(site, conn, source, files, show)
            result = audit(site, conn, source, files)
        except (LeaseTaskError, psycopg.Error):
            site.print_log()
            raise
        show.table(_rows(result, story))
        if result.passed:
            print("Every file is there, right, and once.")
        else:
            print("FAILED", *result.troubles[:SHOWN], sep="\n  ")
            site.print_log()
        if keep:
            print(f"kept: {site.folder}; in the database: schema and kind {site.name}")
        return 0 if result.passed else 1


# --- the run -----------------------------------------------------------------------------------


def ingest_all(site: Site, conn: Connection, source: Path, files: list[str], show: Show) -> Story:
    """Have every file ingested, with a worker killed on the way."""
    enqueue(site, conn, source, files)
    show.line(f"{_tasks(len(files))} and their business table committed in one transaction")
    slots, pause = SLOTS, 0.0
    if len(files) < FEW:
        slots = max(1, min(SLOTS, len(files) // 6))
        pause = min(0.5, 0.75 * WORKERS * slots / len(files))
        show.line(f"few files: each step takes {pause:.2f} s longer, to have a middle to kill in")
    with Fleet(site, slots, pause) as fleet:
        for _ in range(WORKERS):
            show.line(f"worker {fleet.start()} started")
        return Watch(site, conn, fleet, show, len(files)).until_done()


def enqueue(site: Site, conn: Connection, source: Path, files: list[str]) -> None:
    """Make the business table and one task per file, in one transaction."""
    app = App(site.dsn)
    app.task(kind=site.name, retry=example.registry.resolve(ingest).retry)(ingest)
    names = {str(site.copies / name): name for name in files}
    media = [Media(str(source / name), copy) for copy, name in names.items()]
    with conn.transaction():
        conn.execute(sql.SQL("create schema {}").format(sql.Identifier(site.name)))
        conn.execute(TABLE)
        app.enqueue_many(ingest, media, key=lambda media: names[media.target], conn=conn)


class Watch:
    """Follows the tasks until all have ended, and strikes when a third has."""

    def __init__(self, site: Site, conn: Connection, fleet: Fleet, show: Show, total: int) -> None:
        self._site = site
        self._conn = conn
        self._fleet = fleet
        self._show = show
        self._total = total
        self._story = Story()
        self._began = time.monotonic()

    def until_done(self) -> Story:
        """Watch to the end.

        Raises:
            WorkerError: a worker ended by itself, or nothing ends any more.
        """
        ended, moved_at = 0, time.monotonic()
        while ended < self._total:
            time.sleep(POLL)
            self._fleet.check()
            before, ended = ended, self._count_ended()
            self._show.done(ended)
            if ended > before:
                moved_at = time.monotonic()
            elif time.monotonic() - moved_at > PATIENCE:
                raise WorkerError(f"{ended} of {self._total} tasks ended, none for {PATIENCE} s")
            if self._story.kill is None:
                if ended < self._total <= 3 * ended:
                    self._strike(ended)
            elif self._story.recovered_after is None:
                self._look_for_recovery(self._story.kill)
        self._story.seconds = time.monotonic() - self._began
        return self._story

    def _count_ended(self) -> int:
        query = "select count(*) from leasetask.task where kind = %s and finished_at is not null"
        return int(first(self._conn.execute(query, (self._site.name,)).fetchall()))

    def _strike(self, ended: int) -> None:
        kill = self._fleet.kill_one(self._conn)
        if kill is None:
            return
        self._story.kill = kill
        self._story.killed_after = time.monotonic() - self._began
        self._story.done_before = ended
        held = _tasks(len(kill.held))
        self._show.line(f"worker {kill.pid} killed with SIGKILL, {held} in its hands")
        self._show.line(f"worker {self._fleet.start()} started in its place")

    def _look_for_recovery(self, kill: Kill) -> None:
        query = (
            "select extract(epoch from min(claimed_at) - %s)::float8 from leasetask.task"
            " where id = any(%s::uuid[]) and claimed_at > %s"
        )
        after = first(self._conn.execute(query, (kill.at, kill.held, kill.at)).fetchall())
        if after is not None:
            self._story.recovered_after = after
            self._show.line(f"the first of them went on elsewhere {after:.1f} s after the kill")


# --- the audit ---------------------------------------------------------------------------------


def audit(site: Site, conn: Connection, source: Path, files: list[str]) -> Audit:
    """Look at every file, task, business row and step body."""
    tasks = {
        key: (status, error)
        for key, status, error in conn.execute(
            "select idempotency_key, status, last_error ->> 'message' from leasetask.task"
            " where kind = %s",
            (site.name,),
        )
    }
    rows = {
        target: (count, sha256)
        for target, count, sha256 in conn.execute(
            "select target, count(*), min(sha256) from ingested group by target"
        )
    }
    result = Audit(len(files))
    result.steps, result.cut_off, repeated = read_ledger(site.ledger)
    result.duplicated = repeated + sum(count - 1 for count, _ in rows.values())
    for name in files:
        status, error = tasks.get(name, ("missing", None))
        copy = site.copies / name
        _, recorded = rows.get(str(copy), (0, None))
        result.succeeded += status == "succeeded"
        if status != "succeeded":
            result.lost += 1
            result.troubles.append(f"{name}: its task is {status}: {error}")
        elif recorded is None or not copy.is_file():
            result.lost += 1
            result.troubles.append(f"{name}: its task succeeded, but row or copy is missing")
        elif sha256_of(copy) == recorded == sha256_of(source / name):
            result.verified += 1
        else:
            result.troubles.append(f"{name}: the copy differs from the file")
    return result


def sha256_of(path: Path) -> str | None:
    """Hash a file; None if it cannot be read (any more)."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def read_ledger(ledger: Path) -> tuple[int, int, int]:
    """Count the step bodies that began, began again unrecorded, and began again recorded.

    The body of a task's next step begins once the one before is recorded, so a body that is noted
    again was recorded if another one of its task was noted in between, and cut off if none was.
    """
    began = cut_off = repeated = 0
    seen: set[tuple[str, str]] = set()
    newest: dict[str, str] = {}
    for line in ledger.read_text().splitlines():
        task, step = line.split()
        if step != END:
            began += 1
            if (task, step) in seen:
                cut_off += newest[task] == step
                repeated += newest[task] != step
        seen.add((task, step))
        newest[task] = step
    return began, cut_off, repeated


# --- the report --------------------------------------------------------------------------------


def _rows(result: Audit, story: Story) -> list[Row]:
    again = f"{result.cut_off:,} of them again, having left no record" if result.cut_off else ""
    killed = recovered = ("never", "all was done too soon")
    if story.kill is not None:
        killed = (f"{story.killed_after:.1f} s", f"with {_tasks(story.done_before)} done")
        after = story.recovered_after
        recovered = ("-" if after is None else f"{after:.1f} s", f"of which {LEASE:g} s lease")
    return [
        ("files", f"{result.files:,}", ""),
        ("tasks succeeded", f"{result.succeeded:,}", f"in {story.seconds:.1f} s"),
        ("steps run", f"{result.steps:,}", again),
        ("killed at", *killed),
        ("first recovered after", *recovered),
        ("copies verified by hash", f"{result.verified:,}", ""),
        ("lost", f"{result.lost:,}", "without a finished task, row or copy"),
        ("duplicated", f"{result.duplicated:,}", "rows, and recorded steps run again"),
    ]


def _tasks(count: int) -> str:
    return "1 task" if count == 1 else f"{count:,} tasks"
