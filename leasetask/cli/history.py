"""`export`, `replay`: histories for tests, and a check before a deploy."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click

from leasetask import client, protocol
from leasetask.app import App
from leasetask.cli.common import REFUSED, cli, dsn_option, emit, json_option, server_of
from leasetask.connection import connect, fetch
from leasetask.errors import ReplayError, TaskNotFound, UnknownKind
from leasetask.history import History
from leasetask.history import check as check_history
from leasetask.loading import load_app
from leasetask.registry import Kind


@cli.command()
@click.argument("task_id", metavar="ID")
@dsn_option
def export(task_id: str, dsn: str | None) -> None:
    """Print a task's history as JSON, for a test that replays it.

    Example: leasetask export 0190… > tests/history.json
    """
    id_ = client.task_id(task_id)
    with connect(server_of(dsn)) as conn:
        rows = fetch(conn, protocol.history(id_))
    if not rows:
        raise TaskNotFound(f"no task {id_}; `leasetask list` shows what there is")
    click.echo(json.dumps(asdict(History(*rows[0])), indent=2, ensure_ascii=False))


@cli.command()
@click.argument("spec", metavar="MODULE:APP")
@click.option("--waiting", is_flag=True, help="Tasks that wait.")
@click.option("--running", is_flag=True, help="Tasks that run.")
@click.option("--pending", is_flag=True, help="Tasks that are due or will be.")
@dsn_option
@json_option
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
    with connect(server_of(dsn)) as conn:
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
    emit({"checked": checked, "broken": broken}, as_json, text)
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
