"""Ingest files: hash each one, copy it, verify the copy, record it; once, whatever crashes.

Try it:
    export LEASETASK_DSN=postgresql://localhost/media
    leasetask migrate
    python examples/ingest.py ~/Pictures /mnt/archive     # one task per file
    leasetask worker examples/ingest.py:app               # as many of these as you like
"""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from leasetask import App, Context, Done, NonRetryable, NotDone, Retry

Connection = psycopg.Connection[Any]
CHUNK = 1024 * 1024
TABLE = """
    create table if not exists ingested (
      task_id uuid not null, source text not null, target text not null, sha256 text not null
    )
"""

app = App()


@dataclass
class Media:
    """A task's input: the file to copy, and where to."""

    source: str
    target: str


@dataclass
class Ingested:
    """A task's result."""

    target: str
    sha256: str


@app.task(retry=Retry(max_attempts=3))
def ingest(ctx: Context, media: Media) -> Ingested:
    """Bring one file in.

    After a crash another worker runs this again from the top: a step that is recorded gives its
    result without running, so the work goes on where it stood. A step that was cut off runs again,
    and has to be written for that.
    """
    sha256 = ctx.step("hash", digest, ctx, media.source)
    target = ctx.effect(
        "copy",
        lambda attempt: copy(ctx, media.source, media.target),
        lambda attempt: find_copy(ctx, media, sha256),
        compensate=delete,
    )
    ctx.step("verify", verify, ctx, target, sha256)
    ctx.transaction("record", record, ctx.task_id, media.source, target, sha256)
    return Ingested(target, sha256)


def digest(ctx: Context, path: str) -> str:
    """Hash a file."""
    sha256 = hashlib.sha256()
    with Path(path).open("rb") as file:
        while chunk := file.read(CHUNK):
            ctx.check()
            sha256.update(chunk)
    return sha256.hexdigest()


def copy(ctx: Context, source: str, target: str) -> str:
    """Copy a file to a name of this run's own, and rename it when it is whole."""
    goal = Path(target)
    goal.parent.mkdir(parents=True, exist_ok=True)
    parts = [goal.with_name(f".{ctx.task_id}-{run}.part") for run in range(1, ctx.run + 1)]
    try:
        with Path(source).open("rb") as reader, parts[-1].open("wb") as writer:
            size = os.fstat(reader.fileno()).st_size
            while chunk := reader.read(CHUNK):
                ctx.check()  # raises when the lease is lost or a cancel was asked for
                writer.write(chunk)
                ctx.progress(writer.tell() / max(size, writer.tell()), goal.name)
            writer.flush()
            os.fsync(writer.fileno())
        parts[-1].replace(goal)
        folder = os.open(goal.parent, os.O_RDONLY)
        os.fsync(folder)  # the rename too survives a power cut
        os.close(folder)
    finally:
        for part in parts:  # ours if we could not finish, and what killed runs left
            part.unlink(missing_ok=True)
    return target


def find_copy(ctx: Context, media: Media, sha256: str) -> Done[str] | NotDone:
    """Say what became of a copy that was begun and not recorded: its path, size and hash tell."""
    goal, source = Path(media.target), Path(media.source)
    if not goal.is_file() or goal.stat().st_size != source.stat().st_size:
        return NotDone()
    return Done(media.target) if digest(ctx, media.target) == sha256 else NotDone()


def delete(target: str) -> None:
    """Take a copy back: its task was canceled or failed, so nothing will refer to it."""
    Path(target).unlink(missing_ok=True)


def verify(ctx: Context, target: str, sha256: str) -> None:
    """Read the copy back; a bad one stays bad, however often it is read."""
    if digest(ctx, target) != sha256:
        raise NonRetryable(f"{target} differs from what was read")


def record(db: Connection, task_id: str, source: str, target: str, sha256: str) -> None:
    """Write the business row; it commits together with the step's record, so never twice."""
    db.execute(
        "insert into ingested (task_id, source, target, sha256) values (%s, %s, %s, %s)",
        (task_id, source, target, sha256),
    )


def main(folder: Path, target: Path) -> None:
    """Enqueue a folder; again later, for what is new in it: the key names a file's task."""
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    found = [Media(str(folder / name), str(target / name)) for name in sorted(files)]
    with psycopg.connect(app.dsn) as db:  # one transaction: the table and all tasks, or nothing
        db.execute(TABLE)
        tasks = app.enqueue_many(ingest, found, key=lambda media: media.target, conn=db)
    print(f"{sum(task.outcome == 'new' for task in tasks)} new of {len(tasks)} files")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
