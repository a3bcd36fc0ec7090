"""The `leasetask` command: thin over the library, one line for each mistake, never a traceback."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal as signals
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec
import psycopg

from leasetask import client, outbox, protocol, schema
from leasetask.app import App
from leasetask.connection import (
    connect,
    dsn_or_environment,
    fetch,
    first,
    is_disconnect,
    translated,
)
from leasetask.errors import (
    ConfigurationError,
    DatabaseUnavailable,
    EmbeddedError,
    LeaseTaskError,
    PayloadError,
    ReplayError,
    TaskNotFound,
    UnknownKind,
)
from leasetask.history import History
from leasetask.history import check as check_history
from leasetask.loading import load_app
from leasetask.maintenance import SWEEP_BATCH
from leasetask.model import Swept
from leasetask.registry import Kind
from leasetask.worker import DEFAULT_ROLES, ROLES, Worker, WorkerOptions

REFUSED, USAGE, NO_SERVER = 1, 2, 3
"""Exit statuses; 0 is done."""


def main() -> NoReturn:
    """Run the command and exit."""
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        _leave("stopped", 130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except (DatabaseUnavailable, EmbeddedError) as error:
        _leave(str(error), NO_SERVER)
    except (PayloadError, ConfigurationError, ValueError) as error:
        _leave(str(error), USAGE)
    except LeaseTaskError as error:
        _leave(str(error), REFUSED)
    except psycopg.Error as error:
        if is_disconnect(error):
            _leave(f"the connection was lost: {' '.join(str(error).split())}", NO_SERVER)
        _leave(str(translated(error) or " ".join(str(error).split())), REFUSED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def _leave(message: str, status: int) -> NoReturn:
    click.echo(f"leasetask: {message}", err=True)
    sys.exit(status)


# --- options that commands share -----------------------------------------------------------------


def _dsn_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--dsn", metavar="DSN", help="PostgreSQL to use; LEASETASK_DSN by default."
    )(command)


def _json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def _embedded_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--embedded", is_flag=True, help="Without a DSN, start the project's own server."
    )(command)


def _server(dsn: str | None, *, embedded: bool = True) -> str:
    """Return the DSN to use; a chore without its environment must not sweep an empty database."""
    known = dsn_or_environment(dsn)
    if known is not None:
        return known
    if not embedded:
        raise DatabaseUnavailable(
            "no database given: set LEASETASK_DSN, or --dsn, or ask for --embedded"
        )
    from leasetask import embedded as launcher  # noqa: PLC0415  # an extra

    return launcher.ensure()


def _ask(dsn: str, call: client.Call[client.T], task_id: str | None = None) -> client.T:
    with connect(dsn) as conn:
        return client.run(call, lambda query: fetch(conn, query), task_id)


def _print(value: Any, as_json: bool, text: str) -> None:
    click.echo(msgspec.json.encode(value).decode() if as_json else text)


def _parse_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise PayloadError(f"{what} is not JSON: {error}") from None


# --- commands --------------------------------------------------------------------------------------


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="leasetask")
def cli() -> None:
    """Durable tasks in your own PostgreSQL.

    Exit status: 0 done, 1 refused or not found, 2 usage, 3 no server.
    """


@cli.command()
@_dsn_option
@_embedded_option
@_json_option
def migrate(dsn: str | None, embedded: bool, as_json: bool) -> None:
    """Create the schema, or bring it to this version.

    Safe to repeat, and from many processes at once.
    Example: leasetask migrate --dsn postgresql://localhost/shop
    """
    before, now = schema.migrate(_server(dsn, embedded=embedded))
    text = "schema leasetask is at version " + str(now)
    if before is None:
        text += " (created)"
    elif before < now:
        text += f" (was {before})"
    _print({"before": before, "version": now}, as_json, text)


@cli.command()
@click.argument("spec", metavar="MODULE:APP")
@_dsn_option
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
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(ROLES),
    default=DEFAULT_ROLES,
    show_default=True,
    help="What it does; give it once for each.",
)
@click.option("--outbox", metavar="DSN", help="Database with outbox_event, for --role outbox.")
@click.option("--log-level", default="info", show_default=True, help="debug, info or warning.")
@click.option("--alone", is_flag=True, hidden=True)
def worker(
    spec: str,
    dsn: str | None,
    concurrency: int,
    lease: float,
    poll: float,
    grace: float,
    roles: tuple[str, ...],
    outbox: str | None,
    log_level: str,
    alone: bool,
) -> None:
    """Run the tasks that MODULE:APP declares.

    SIGTERM drains: running handlers get --grace seconds, the rest is handed back. A second
    SIGTERM, or SIGINT, hurries it.
    Example: leasetask worker shop.tasks:app --concurrency 50
    """
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    app = load_app(spec)
    options = WorkerOptions(
        concurrency=1 if alone else concurrency,
        lease=lease,
        poll_interval=poll,
        grace=grace,
        roles=roles,
        outbox=outbox,
        payload_limit=app.payload_limit,
        spec=spec,
        alone=alone,
        transactions=app.transactions,
    )
    server = dsn_or_environment(dsn) or app.dsn
    schema.check(server)
    _serve(Worker(app.registry, server, options))


def _serve(running: Worker) -> None:
    """Serve until told to stop, then leave at once.

    What is still inside a thread or refuses to be cancelled has been given to the sweep; waiting
    for it, as the interpreter and asyncio do, would overlap with its next run.
    """

    async def serve() -> NoReturn:
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

    asyncio.run(serve())


@cli.command()
@_dsn_option
@_embedded_option
@_json_option
def sweep(dsn: str | None, embedded: bool, as_json: bool) -> None:
    """Recover tasks whose worker died, and fail those past their deadline; for cron.

    Example: * * * * * LEASETASK_DSN=… leasetask sweep
    """
    server = _server(dsn, embedded=embedded)
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
    _print({"counts": counts, "tasks": [asdict(row) for row in done]}, as_json, "\n".join(lines))
    if counts.get("error"):
        sys.exit(REFUSED)


@cli.command()
@click.argument("kind")
@click.argument("input", metavar="JSON")
@click.option("--key", help="Names the task within its kind; a fresh one by default.")
@click.option("--at", help="When it is due: ISO 8601 with a zone, 2030-01-31T08:00:00+01:00.")
@click.option("--delay", type=float, help="Or in how many seconds.")
@click.option("--priority", type=click.IntRange(-32768, 32767), help="Lower runs sooner.")
@_dsn_option
@_json_option
def enqueue(
    kind: str,
    input: str,
    key: str | None,
    at: str | None,
    delay: float | None,
    priority: int | None,
    dsn: str | None,
    as_json: bool,
) -> None:
    """Enqueue a task of KIND with a JSON input.

    Example: leasetask enqueue publish '{"id": 1}' --key order-1
    """
    client.check_name("kind", kind)
    if key is not None:
        client.check_name("key", key)
    encoded = client.encode(_parse_json(input, "the input"), what=f"input of {kind}")
    with connect(_server(dsn)) as conn:
        made = client.run(
            client.enqueue(kind, None, encoded, key, _moment(at), delay, priority),
            lambda query: fetch(conn, query),
        )
        if not first(fetch(conn, protocol.kind_is_declared(kind))):
            click.echo(f"leasetask: warning: no worker has declared kind {kind} yet", err=True)
    _print(asdict(made), as_json, f"{made.id}  {made.outcome}")


def _moment(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise PayloadError(f"--at {text!r} is not a time in ISO 8601") from None


@cli.command()
@click.argument("topic")
@click.argument("payload", metavar="[JSON]", required=False)
@click.option("--sticky", is_flag=True, help="A latch: everyone sees it, now and later.")
@click.option("--clear", is_flag=True, help="End the topic's latch instead.")
@_dsn_option
@_json_option
def signal(
    topic: str,
    payload: str | None,
    sticky: bool,
    clear: bool,
    dsn: str | None,
    as_json: bool,
) -> None:
    """Send a signal to whoever waits on TOPIC, now or later.

    Example: leasetask signal paid:order-1 '{"by": "card"}'
    """
    if clear:
        if payload is not None or sticky:
            raise click.UsageError("--clear goes with a topic alone")
        cleared = _ask(_server(dsn), client.clear_signal(topic))
        _print({"cleared": cleared}, as_json, "cleared" if cleared else "there was no latch")
        return
    value = None if payload is None else _parse_json(payload, "the payload")
    woken = _ask(_server(dsn), client.signal(topic, value, sticky, client.DEFAULT_LIMIT, True))
    _print({"woken": woken}, as_json, f"sent; {woken} woken")


@cli.command()
@click.argument("task_id", metavar="ID")
@click.option("--reason", help="Kept with the task.")
@_dsn_option
@_json_option
def cancel(task_id: str, reason: str | None, dsn: str | None, as_json: bool) -> None:
    """Ask a task to stop.

    Example: leasetask cancel 0190… --reason "customer withdrew"
    """
    id_ = client.task_id(task_id)
    outcome = _ask(_server(dsn), client.cancel(id_, reason), id_)
    explained = {
        "canceled": "canceled",
        "compensating": "its compensations run first; then it is canceled",
        "requested": "requested; it is running and learns of it within a heartbeat",
        "finished": "it had ended before; nothing was done",
    }
    _print({"id": id_, "outcome": outcome}, as_json, f"{id_}  {explained[outcome]}")
    if outcome == "finished":
        sys.exit(REFUSED)


@cli.command()
@click.argument("task_id", metavar="ID")
@_dsn_option
@_json_option
def retry(task_id: str, dsn: str | None, as_json: bool) -> None:
    """Give a failed or dead task another chance, from the step that failed.

    Example: leasetask retry 0190…
    """
    id_ = client.task_id(task_id)
    _ask(_server(dsn), client.retry(id_), id_)
    _print({"id": id_, "status": "pending"}, as_json, f"{id_}  due again")


@cli.command()
@click.argument("task_id", metavar="ID")
@click.argument("step")
@click.option("--done", metavar="JSON", help="It happened, with this result.")
@click.option("--redo", is_flag=True, help="It did not happen: do it again.")
@_dsn_option
@_json_option
def resolve(
    task_id: str, step: str, done: str | None, redo: bool, dsn: str | None, as_json: bool
) -> None:
    """Decide on an effect of which nobody can tell whether it happened.

    Example: leasetask resolve 0190… add-torrent --done '"abc123"'
    """
    if redo == (done is not None):
        raise click.UsageError("give --done JSON or --redo")
    id_ = client.task_id(task_id)
    value = None if done is None else _parse_json(done, "--done")
    _ask(_server(dsn), client.resolve(id_, step, value, redo, client.DEFAULT_LIMIT), id_)
    _print({"id": id_, "status": "pending"}, as_json, f"{id_}  decided; due again")


@cli.command()
@click.argument("task_id", metavar="ID")
@_dsn_option
@_json_option
def show(task_id: str, dsn: str | None, as_json: bool) -> None:
    """Show one task.

    Example: leasetask show 0190…
    """
    view = asdict(_ask(_server(dsn), client.get(client.task_id(task_id))))
    width = max(map(len, view))
    lines = [
        f"{name:<{width}}  {value if isinstance(value, str) else _readable(value)}"
        for name, value in view.items()
        if value not in (None, [])
    ]
    _print(view, as_json, "\n".join(lines))


def _readable(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="milliseconds")
    return json.dumps(value, ensure_ascii=False, default=str)


@cli.command()
@click.argument("task_id", metavar="ID")
@_dsn_option
def export(task_id: str, dsn: str | None) -> None:
    """Print a task's history as JSON, for a test that replays it.

    Example: leasetask export 0190… > tests/history.json
    """
    id_ = client.task_id(task_id)
    with connect(_server(dsn)) as conn:
        rows = fetch(conn, protocol.history(id_))
    if not rows:
        raise TaskNotFound(f"no task {id_}; `leasetask list` shows what there is")
    click.echo(json.dumps(asdict(History(*rows[0])), indent=2, ensure_ascii=False))


@cli.command()
@click.argument("spec", metavar="MODULE:APP")
@click.option("--waiting", is_flag=True, help="Tasks that wait.")
@click.option("--running", is_flag=True, help="Tasks that run.")
@click.option("--pending", is_flag=True, help="Tasks that are due or will be.")
@_dsn_option
@_json_option
def replay(
    spec: str, waiting: bool, running: bool, pending: bool, dsn: str | None, as_json: bool
) -> None:
    """Check that MODULE:APP still replays the unfinished tasks; for CI before a deploy.

    All unfinished tasks by default. One line for each that would break, and exit status 1.
    Example: leasetask replay shop.tasks:app --waiting --running
    """
    flags = {"waiting": waiting, "running": running, "pending": pending}
    statuses = [name for name, given in flags.items() if given] or list(flags)
    app = load_app(spec)
    broken: list[dict[str, str]] = []
    checked = 0
    with connect(_server(dsn)) as conn:
        after: str | None = None
        while rows := fetch(conn, protocol.unfinished_histories(statuses, after, _REPLAY_PAGE)):
            for row in rows:
                history = History(*row)
                after, checked = history.id, checked + 1
                try:
                    check_history(_kind_of(app, history), history)
                except (ReplayError, UnknownKind) as error:
                    broken.append({"id": history.id, "kind": history.kind, "error": str(error)})
    text = "\n".join(
        [b["error"] for b in broken] + [f"{checked} checked, {len(broken)} would break"]
    )
    _print({"checked": checked, "broken": broken}, as_json, text)
    if broken:
        sys.exit(REFUSED)


_REPLAY_PAGE = 500


def _kind_of(app: App, history: History) -> Kind:
    kind = app.registry.find(history.kind, history.version)
    if kind is None:
        raise UnknownKind(
            f"task {history.id} ({history.kind} version {history.version}) would break: "
            "nobody declares this version"
        )
    return kind


@cli.group(name="outbox")
def outbox_group() -> None:
    """Make tasks of rows that a transaction in another database wrote."""


def _business_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--from", "business", metavar="DSN", required=True, help="The business's database."
    )(command)


@outbox_group.command()
@_business_option
def install(business: str) -> None:
    """Create the table outbox_event there; safe to repeat.

    Example: leasetask outbox install --from postgresql://localhost/shop
    """
    outbox.install(business)
    click.echo("outbox_event is there")


@outbox_group.command()
@_business_option
@click.option("--once", is_flag=True, help="What is pending now, then end; for cron.")
@click.option("--every", default=1.0, show_default=True, help="Seconds between rounds.")
@_dsn_option
@_embedded_option
@_json_option
def dispatch(
    business: str, once: bool, every: float, dsn: str | None, embedded: bool, as_json: bool
) -> None:
    """Enqueue what is pending in the outbox, for ever or --once.

    Exit status 1 if rows were refused: their error says why.
    Example: leasetask outbox dispatch --from postgresql://localhost/shop --once
    """
    server = _server(dsn, embedded=embedded)
    schema.check(server)
    while True:
        try:
            done = outbox.dispatch(business, server)
        except DatabaseUnavailable as error:
            if once:
                raise
            click.echo(f"leasetask: {error}", err=True)
        else:
            if once or done.rows:
                text = f"{done.enqueued} enqueued, {done.refused} refused"
                _print(asdict(done), as_json, text)
            if once:
                sys.exit(REFUSED if done.refused else 0)
        time.sleep(every)


@outbox_group.command(name="prune")
@_business_option
@click.option("--older-than", default=7.0, show_default=True, help="Days since the dispatch.")
@_json_option
def outbox_prune(business: str, older_than: float, as_json: bool) -> None:
    """Delete dispatched rows.

    Example: leasetask outbox prune --from postgresql://localhost/shop --older-than 3
    """
    count = outbox.prune(business, older_than * 86400)
    _print({"deleted": count}, as_json, f"{count} rows deleted")


@cli.command()
@click.argument("folder", required=False, type=click.Path(exists=True, file_okay=False))
@click.option("--keep", is_flag=True, help="Keep the copies and the database of the demo.")
@_dsn_option
def demo(folder: str | None, keep: bool, dsn: str | None) -> None:
    """Copy a folder through leasetask while a worker is killed, and count what came out.

    FOLDER: the Python standard library's own by default. Exit status 1 unless every copy is right
    and nothing is lost or doubled.
    Example: leasetask demo ~/Pictures
    """
    from leasetask.demo import run_demo  # noqa: PLC0415  # only this command needs it

    sys.exit(run_demo(Path(folder) if folder else None, dsn_or_environment(dsn), keep=keep))
