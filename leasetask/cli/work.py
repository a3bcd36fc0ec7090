"""`migrate`, `worker`, `sweep`, `demo`."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal as signals
import sys
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import click

from leasetask import protocol, schema
from leasetask.cli import logs
from leasetask.cli.common import (
    REFUSED,
    cli,
    dsn_option,
    embedded_option,
    emit,
    json_option,
    server_of,
)
from leasetask.connection import connect, dsn_or_environment, fetch
from leasetask.errors import LeaseTaskError
from leasetask.loading import load_app
from leasetask.maintenance import SWEEP_BATCH
from leasetask.model import Swept
from leasetask.worker import DEFAULT_ROLES, ROLES, Worker, WorkerOptions

logger = logging.getLogger("leasetask")


@cli.command()
@dsn_option
@embedded_option
@click.option(
    "--roles", is_flag=True, help="Create roles for producer, worker, operator, observer."
)
@json_option
def migrate(dsn: str | None, embedded: bool, roles: bool, as_json: bool) -> None:
    """Create the schema, or bring it to this version.

    Safe to repeat, and from many processes at once.
    Example: leasetask migrate --dsn postgresql://localhost/shop
    """
    before, now = schema.migrate(server_of(dsn, embedded=embedded), roles=roles)
    text = "schema leasetask is at version " + str(now)
    if before is None:
        text += " (created)"
    elif before < now:
        text += f" (was {before})"
    if roles:
        text += (
            "; roles leasetask_producer, _worker, _operator and _observer are there to be granted"
        )
    emit({"before": before, "version": now, "roles": roles}, as_json, text)


@cli.command()
@click.argument("spec", metavar="MODULE:APP")
@dsn_option
@click.option("--concurrency", "-c", default=20, show_default=True, help="Tasks at a time.")
@click.option(
    "--lease", default=30.0, show_default=True, help="Seconds until a dead worker is noticed."
)
@click.option(
    "--poll", default=1.0, show_default=True, help="Seconds between looks when nothing notifies."
)
@click.option(
    "--grace", default=30.0, show_default=True, help="Seconds handlers may run after SIGTERM."
)
@click.option(
    "--retention",
    default=30.0,
    show_default=True,
    metavar="DAYS",
    help="Finished tasks older than this are pruned; 0 keeps all.",
)
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(ROLES),
    default=DEFAULT_ROLES,
    show_default=True,
    help="What it does; give it once for each.",
)
@click.option(
    "--listen-dsn",
    metavar="DSN",
    envvar="LEASETASK_LISTEN_DSN",
    help="A direct way to the server, to hear notifications where --dsn is a pooler.",
)
@click.option("--outbox", metavar="DSN", help="Database with outbox_event, for --role outbox.")
@click.option(
    "--log-level", default="info", show_default=True, help="debug, info, warning or error."
)
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True
)
@click.option(
    "--metrics", metavar="HOST:PORT", help="Serve /metrics and /healthz, as on 127.0.0.1:9100."
)
@click.option("--alone", is_flag=True, hidden=True)
def worker(
    spec: str,
    dsn: str | None,
    concurrency: int,
    lease: float,
    poll: float,
    grace: float,
    retention: float,
    roles: tuple[str, ...],
    listen_dsn: str | None,
    outbox: str | None,
    log_level: str,
    log_format: str,
    metrics: str | None,
    alone: bool,
) -> None:
    """Run the tasks that MODULE:APP declares.

    SIGTERM drains: running handlers get --grace seconds, the rest is handed back. A second
    SIGTERM, or SIGINT, hurries it.
    Example: leasetask worker shop.tasks:app --concurrency 50
    """
    logs.configure(log_level, log_format)
    app = load_app(spec)
    options = WorkerOptions(
        concurrency=1 if alone else concurrency,
        lease=lease,
        poll_interval=poll,
        grace=grace,
        retention=retention * 86400 if retention else None,
        roles=roles,
        outbox=outbox,
        listen_dsn=listen_dsn,
        payload_limit=app.payload_limit,
        spec=spec,
        alone=alone,
        transactions=app.transactions,
        revive=None if dsn_or_environment(dsn) else app.revive,
    )
    server = dsn_or_environment(dsn) or app.dsn
    schema.check(server)
    running = Worker(app.registry, server, options)
    if metrics is not None:
        from leasetask.monitor import Monitor  # noqa: PLC0415  # an extra

        logger.info("http://%s/metrics and /healthz", Monitor(running, metrics).address)
    serve(running)


def serve(running: Worker) -> None:
    """Serve as this process's whole work until told to stop, then leave at once.

    What is still inside a thread or refuses to be cancelled has been given to the sweep; waiting
    for it, as the interpreter and asyncio do, would overlap with its next run.
    """

    async def until_stopped() -> NoReturn:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signals.SIGTERM, running.stop)
        loop.add_signal_handler(signals.SIGINT, lambda: running.stop(hurry=True))
        status = 0
        try:
            await running.serve()
        except LeaseTaskError as error:
            click.echo(f"leasetask: {error}", err=True)
            status = REFUSED
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    # What the imports have left never becomes garbage; looking through it took a tenth of the CPU.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
    asyncio.run(until_stopped())


@cli.command()
@dsn_option
@embedded_option
@json_option
def sweep(dsn: str | None, embedded: bool, as_json: bool) -> None:
    """Recover tasks whose worker died, and fail those past their deadline; for cron.

    Example: * * * * * LEASETASK_DSN=… leasetask sweep
    """
    server = server_of(dsn, embedded=embedded)
    schema.check(server)
    done: list[Swept] = []
    with connect(server, name="leasetask sweep") as conn:
        while True:
            rows = [protocol.swept(row) for row in fetch(conn, protocol.sweep(SWEEP_BATCH))]
            done += rows
            if sum(row.outcome != "error" for row in rows) < SWEEP_BATCH:
                break
    counts: dict[str, int] = {}
    for row in done:
        counts[row.outcome] = counts.get(row.outcome, 0) + 1
    lines = [f"{row.outcome:<13} {row.id}  {row.kind}  {row.error or ''}".rstrip() for row in done]
    lines.append(", ".join(f"{n} {what}" for what, n in sorted(counts.items())) or "nothing to do")
    emit({"counts": counts, "tasks": [asdict(row) for row in done]}, as_json, "\n".join(lines))
    if counts.get("error"):
        sys.exit(REFUSED)


@cli.command()
@click.argument("folder", required=False, type=click.Path(exists=True, file_okay=False))
@click.option("--keep", is_flag=True, help="Keep the copies and the database of the demo.")
@dsn_option
def demo(folder: str | None, keep: bool, dsn: str | None) -> None:
    """Copy a folder through leasetask while a worker is killed, and count what came out.

    FOLDER: the Python standard library's own by default. Exit status 1 unless every copy is right
    and nothing is lost or doubled.
    Example: leasetask demo ~/Pictures
    """
    from leasetask.demo import run_demo  # noqa: PLC0415  # only this command needs it

    sys.exit(run_demo(Path(folder) if folder else None, dsn_or_environment(dsn), keep=keep))
