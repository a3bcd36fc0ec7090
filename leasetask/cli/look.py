"""`list`, `dead-letter`, `stats`, `top`, `doctor`: for whoever asks what goes on."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import Any

import click

from leasetask import client, doctor, protocol, schema
from leasetask.cli.common import REFUSED, cli, dsn_option, emit, json_option, server_of
from leasetask.cli.render import count, due, duration, show_table
from leasetask.connection import connect, fetch, is_pooled
from leasetask.protocol import Filters, KindStats, Listed, Query, Running

_COUNTED = 20_000
"""Where counting stops, for each kind."""


def _rows(dsn: str | None, *queries: Query) -> list[list[tuple[Any, ...]]]:
    server = server_of(dsn)
    schema.check(server)
    with connect(server) as conn:
        return [fetch(conn, query) for query in queries]


@cli.command(name="list")
@click.option("--kind")
@click.option("--version", type=int)
@click.option(
    "--status",
    "statuses",
    multiple=True,
    type=click.Choice(["pending", "running", "waiting", "succeeded", "failed", "canceled", "dead"]),
    help="Give it once for each.",
)
@click.option("--key", help="Goes with --kind.")
@click.option("--topic", help="Tasks that wait on it.")
@click.option("--older-than", type=float, metavar="SECONDS", help="Enqueued longer ago.")
@click.option("--priority", type=int)
@click.option("--before", metavar="ID", help="The page that follows this task.")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1, 10_000))
@dsn_option
@json_option
def list_command(
    kind: str | None,
    version: int | None,
    statuses: tuple[str, ...],
    key: str | None,
    topic: str | None,
    older_than: float | None,
    priority: int | None,
    before: str | None,
    limit: int,
    dsn: str | None,
    as_json: bool,
) -> None:
    """List tasks, the newest first.

    Without --topic, --kind with --key, or a --status of what has not ended well, it looks at the newest
    100,000 only.
    Example: leasetask list --kind publish --status failed --status dead
    """
    if key is not None and kind is None:
        raise click.UsageError("--key goes with --kind")
    page = None if before is None else client.task_id(before)
    by = Filters(kind, version, statuses or None, key, topic, older_than, priority, page)
    _list(dsn, by, limit, as_json)


@cli.command(name="dead-letter")
@click.option("--kind")
@click.option("--before", metavar="ID", help="The page that follows this task.")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1, 10_000))
@dsn_option
@json_option
def dead_letter(
    kind: str | None, before: str | None, limit: int, dsn: str | None, as_json: bool
) -> None:
    """List what ended failed or dead and awaits a person; mend the cause, then `retry`.

    Example: leasetask dead-letter --kind publish
    """
    page = None if before is None else client.task_id(before)
    _list(dsn, Filters(kind, statuses=("failed", "dead"), before=page), limit, as_json)


def _list(dsn: str | None, by: Filters, limit: int, as_json: bool) -> None:
    (rows,) = _rows(dsn, protocol.list_tasks(by, limit))
    tasks = [Listed(*row) for row in rows]
    if as_json:
        emit([task._asdict() for task in tasks], True, "")
    elif not tasks:
        click.echo("none")
    else:
        headers = ("ID", "KIND", "KEY", "STATUS", "TRIES", "DUE", "AGE", "NOTE")
        show_table(headers, [_listed(task) for task in tasks])
        if len(tasks) == limit:
            click.echo(f"… more: --before {tasks[-1].id}")


def _listed(task: Listed) -> tuple[Any, ...]:
    return (
        task.id,
        task.kind if task.version == 1 else f"{task.kind} v{task.version}",
        task.key[:40],
        task.status,
        f"{task.attempts}/{task.max_attempts}",
        due(task.due_in),
        duration(task.age),
        (task.note or "-")[:80],
    )


@cli.command()
@click.option(
    "--period",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    help="Seconds that rates look back.",
)
@dsn_option
@json_option
def stats(period: float, dsn: str | None, as_json: bool) -> None:
    """Count tasks per kind and version, with rates and times; name those that nobody can run.

    Counts stop at 20,000 a kind (shown with a plus); rates look at the last 2,000 ends at the most, and
    run times at the last run of a task. Canceled tasks count in neither.
    Example: leasetask stats --json
    """
    (rows,) = _rows(dsn, protocol.stats(period, _COUNTED))
    found = [KindStats(*row) for row in rows]
    orphaned = doctor.unsupported(found)
    if as_json:
        names = [{"kind": s.kind, "version": s.version} for s in orphaned]
        emit({"kinds": [s._asdict() for s in found], "nobody_runs": names}, True, "")
        return
    show_table(_STATS_HEADERS, [_stats_row(s, period) for s in found])
    for s in orphaned:
        click.echo(
            f"nobody runs {s.kind} version {s.version}: {s.ready + s.later + s.waiting} tasks, "
            f"the oldest due for {duration(s.oldest_ready)}"
        )


_STATS_HEADERS = (
    *("KIND", "READY", "LATER", "WAITING", "RUNNING", "OLDEST READY", "ENDS/S", "FAILED"),
    *("WAIT P50/P95", "RUN P50/P95"),
)


def _stats_row(s: KindStats, period: float) -> tuple[Any, ...]:
    ends = s.succeeded + s.failed
    return (
        f"{s.kind} v{s.version}" + (" (paused)" if s.paused else ""),
        count(s.ready, _COUNTED),
        count(s.later, _COUNTED),
        count(s.waiting, _COUNTED),
        s.running,
        duration(s.oldest_ready),
        f"{ends / period:.1f}",
        f"{s.failed / ends:.0%}" if ends else "-",
        f"{duration(s.wait_p50)} / {duration(s.wait_p95)}",
        f"{duration(s.run_p50)} / {duration(s.run_p95)}",
    )


@cli.command()
@click.option(
    "--every",
    type=click.FloatRange(min=0, min_open=True),
    default=2.0,
    show_default=True,
    help="Seconds between looks.",
)
@click.option("--once", is_flag=True, help="One look, no screen.")
@click.option("--limit", default=30, show_default=True, help="Running tasks shown.")
@dsn_option
@json_option
def top(every: float, once: bool, limit: int, dsn: str | None, as_json: bool) -> None:
    """Show what runs now, on whom and for how long, live.

    Example: leasetask top --every 1
    """
    while True:
        kinds, runs = _rows(dsn, protocol.stats(60.0, _COUNTED), protocol.running(limit))
        found, running = [KindStats(*row) for row in kinds], [Running(*row) for row in runs]
        if as_json:
            value = {
                "kinds": [s._asdict() for s in found],
                "running": [r._asdict() for r in running],
            }
            emit(value, True, "")
        else:
            if not once:
                click.clear()
            _show_top(found, running)
        if once:
            return
        time.sleep(every)


def _show_top(found: list[KindStats], runs: list[Running]) -> None:
    ready, running = sum(s.ready for s in found), sum(s.running for s in found)
    ends = sum(s.succeeded + s.failed for s in found)
    click.echo(f"{running} running, {ready} ready, {ends / 60:.1f} ends/s in the last minute\n")
    if runs:
        headers = ("ID", "KIND", "STEP", "PROGRESS", "FOR", "LEASE LEFT", "TRY", "WORKER")
        show_table(headers, [_running(run) for run in runs])


def _running(run: Running) -> tuple[Any, ...]:
    return (
        run.id,
        f"{run.kind} v{run.version}",
        _step(run),
        _progress(run.progress),
        duration(run.since),
        duration(run.lease_left),
        run.attempts,
        run.owner,
    )


def _step(run: Running) -> str | None:
    if run.step is None or run.step_for is None:
        return run.step
    return f"{run.step} ({duration(run.step_for)})"


def _progress(progress: dict[str, Any] | None) -> str:
    if progress is None:
        return "-"
    fraction = progress.get("fraction")
    share = "" if fraction is None else f"{fraction:.0%} "
    return (share + (progress.get("message") or "")).strip() or "-"


@cli.command(name="doctor")
@dsn_option
@json_option
def doctor_command(dsn: str | None, as_json: bool) -> None:
    """Look for what is wrong: each finding comes with the command that mends it.

    Exit status 1 if there is an error among the findings.
    Example: leasetask doctor
    """
    server = server_of(dsn)
    schema.check(server)
    with connect(server) as conn:
        pooled = is_pooled(conn)
        findings = doctor.examine(lambda query: fetch(conn, query), pooled=pooled)
    lines = [f"{f.level}: {f.what}\n  mend: {f.mend}" for f in findings]
    emit([asdict(f) for f in findings], as_json, "\n".join(lines) or "all is well")
    if any(f.level == "error" for f in findings):
        sys.exit(REFUSED)
