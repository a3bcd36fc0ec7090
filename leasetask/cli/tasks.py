"""`enqueue`, `signal`, `cancel`, `retry`, `resolve`: what changes one task."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from typing import Any, TextIO

import click
import psycopg

from leasetask import client, protocol
from leasetask.cli.common import (
    REFUSED,
    ask,
    cli,
    dsn_option,
    emit,
    json_option,
    parse_json,
    server_of,
)
from leasetask.cli.render import progress
from leasetask.connection import connect, fetch, first
from leasetask.errors import PayloadError, TaskNotFound, TaskRefused
from leasetask.model import Enqueued
from leasetask.payload import name_in_a_line


@cli.command()
@click.argument("kind")
@click.argument("input", metavar="[JSON]", required=False)
@click.option("--key", help="Names the task within its kind; a fresh one by default.")
@click.option(
    "--from-file",
    type=click.File(encoding="utf-8"),
    help="Or many: a file with one JSON input a line; - for standard input.",
)
@click.option("--key-field", help="With --from-file: the field of each input that is its key.")
@click.option("--at", help="When it is due: ISO 8601 with a zone, 2030-01-31T08:00:00+01:00.")
@click.option("--delay", type=float, help="Or in how many seconds.")
@click.option("--priority", type=click.IntRange(-32768, 32767), help="Lower runs sooner.")
@dsn_option
@json_option
def enqueue(
    kind: str,
    input: str | None,
    key: str | None,
    from_file: TextIO | None,
    key_field: str | None,
    at: str | None,
    delay: float | None,
    priority: int | None,
    dsn: str | None,
    as_json: bool,
) -> None:
    """Enqueue a task of KIND with a JSON input, or one for each line of a file.

    A file is read and checked whole before anything is sent.
    Example: leasetask enqueue publish '{"id": 1}' --key order-1
    """
    client.check_name("kind", kind)
    if from_file is not None:
        if input is not None or key is not None:
            raise click.UsageError("--from-file goes without JSON and --key; use --key-field")
        inputs, keys = _read_inputs(from_file, kind, key_field)
        _enqueue_file(kind, inputs, keys, (_moment(at), delay, priority), dsn, as_json)
        return
    if input is None or key_field is not None:
        raise click.UsageError("give JSON, or --from-file")
    if key is not None:
        client.check_name("key", key)
    encoded = client.encode(parse_json(input, "the input"), what=f"input of {name_in_a_line(kind)}")
    with connect(server_of(dsn)) as conn:
        made = client.run(
            client.enqueue(kind, None, encoded, key, _moment(at), delay, priority),
            lambda query: fetch(conn, query),
        )
        if not first(fetch(conn, protocol.kind_is_declared(kind))):
            click.echo(
                f"leasetask: warning: no worker has declared kind {name_in_a_line(kind)} yet",
                err=True,
            )
    emit(asdict(made), as_json, f"{made.id}  {made.outcome}")


def _read_inputs(
    file: TextIO, kind: str, key_field: str | None
) -> tuple[list[str], list[str | None]]:
    """Return the encoded inputs of a file and their keys; raises PayloadError with the line."""
    inputs: list[str] = []
    keys: list[str | None] = []
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        value = parse_json(line, f"line {number}")
        key = None
        if key_field is not None:
            key = value.get(key_field) if isinstance(value, dict) else None
            if not isinstance(key, str | int):
                raise PayloadError(f"line {number} has no key in its field {key_field!r}")
            key = client.check_name("key", str(key))
        inputs.append(client.encode(value, what=f"line {number}"))
        keys.append(key)
    return inputs, keys


_CHUNK = 5000
"""Tasks in one statement."""


def _enqueue_file(
    kind: str,
    inputs: list[str],
    keys: list[str | None],
    when: tuple[datetime | None, float | None, int | None],
    dsn: str | None,
    as_json: bool,
) -> None:
    made: list[Enqueued] = []
    with connect(server_of(dsn)) as conn, progress("enqueued", len(inputs)) as advance:
        for start in range(0, len(inputs), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            call = client.enqueue_many(kind, None, inputs[chunk], keys[chunk], *when)
            made += client.run(call, lambda query: fetch(conn, query))
            advance(len(inputs[chunk]))
    counts = Counter(task.outcome for task in made)
    lines = [
        f"conflict: key {key} names task {task.id}, which has another input"
        for task, key in zip(made, keys, strict=True)
        if task.outcome == "conflict"
    ]
    lines.append(", ".join(f"{counts[word]} {word}" for word in ("new", "existing", "conflict")))
    emit({"counts": counts, "tasks": [asdict(task) for task in made]}, as_json, "\n".join(lines))
    if counts["conflict"]:
        sys.exit(REFUSED)


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
@dsn_option
@json_option
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
        cleared = ask(server_of(dsn), client.clear_signal(topic))
        emit({"cleared": cleared}, as_json, "cleared" if cleared else "there was no latch")
        return
    value = None if payload is None else parse_json(payload, "the payload")
    woken = ask(server_of(dsn), client.signal(topic, value, sticky, client.DEFAULT_LIMIT, True))
    emit({"woken": woken}, as_json, f"sent; {woken} woken")


@cli.command()
@click.argument("task_id", metavar="ID")
@click.option("--reason", help="Kept with the task.")
@dsn_option
@json_option
def cancel(task_id: str, reason: str | None, dsn: str | None, as_json: bool) -> None:
    """Ask a task to stop.

    Example: leasetask cancel 0190… --reason "customer withdrew"
    """
    id_ = client.task_id(task_id)
    outcome = ask(server_of(dsn), client.cancel(id_, reason), id_)
    explained = {
        "canceled": "canceled",
        "compensating": "its compensations run first; then it is canceled",
        "requested": "requested; it is running and learns of it within a heartbeat",
        "finished": "it had ended before; nothing was done",
    }
    emit({"id": id_, "outcome": outcome}, as_json, f"{id_}  {explained[outcome]}")
    if outcome == "finished":
        sys.exit(REFUSED)


@cli.command()
@click.argument("task_id", metavar="[ID]", required=False)
@click.option("--all", "everything", is_flag=True, help="Every dead letter, of --kind if given.")
@click.option("--kind")
@click.option("--version", type=int)
@click.option("--dry-run", is_flag=True, help="Say how many, change nothing.")
@dsn_option
@json_option
def retry(
    task_id: str | None,
    everything: bool,
    kind: str | None,
    version: int | None,
    dry_run: bool,
    dsn: str | None,
    as_json: bool,
) -> None:
    """Give a failed or dead task another chance, from the step that failed; or --all of them.

    Example: leasetask retry --all --kind publish --dry-run
    """
    if everything == (task_id is not None):
        raise click.UsageError("give an ID, or --all")
    if task_id is not None:
        if dry_run or kind is not None or version is not None:
            raise click.UsageError("--dry-run, --kind and --version go with --all")
        id_ = client.task_id(task_id)
        ask(server_of(dsn), client.retry(id_), id_)
        emit({"id": id_, "status": "pending"}, as_json, f"{id_}  due again")
        return
    with connect(server_of(dsn)) as conn:
        ids = [row[0] for row in fetch(conn, protocol.dead_letter_ids(kind, version, _RETRY_MOST))]
        if not dry_run:
            ids = _retry_all(conn, ids)
    text = f"{len(ids)} would be retried" if dry_run else f"{len(ids)} due again"
    emit({"tasks": ids, "dry_run": dry_run}, as_json, text)


_RETRY_MOST = 100_000


def _retry_all(conn: psycopg.Connection[Any], ids: list[str]) -> list[str]:
    """Retry them one by one; returns those that nobody else had seen to meanwhile."""
    done = []
    with progress("retried", len(ids)) as advance:
        for id_ in ids:
            with suppress(TaskNotFound, TaskRefused):
                client.run(client.retry(id_), lambda query: fetch(conn, query), id_)
                done.append(id_)
            advance(1)
    return done


@cli.command()
@click.argument("task_id", metavar="ID")
@click.argument("step")
@click.option("--done", metavar="JSON", help="It happened, with this result.")
@click.option("--redo", is_flag=True, help="It did not happen: do it again.")
@dsn_option
@json_option
def resolve(
    task_id: str, step: str, done: str | None, redo: bool, dsn: str | None, as_json: bool
) -> None:
    """Decide on an effect of which nobody can tell whether it happened.

    Example: leasetask resolve 0190… add-torrent --done '"abc123"'
    """
    if redo == (done is not None):
        raise click.UsageError("give --done JSON or --redo")
    id_ = client.task_id(task_id)
    value = None if done is None else parse_json(done, "--done")
    ask(server_of(dsn), client.resolve(id_, step, value, redo, client.DEFAULT_LIMIT), id_)
    emit({"id": id_, "status": "pending"}, as_json, f"{id_}  decided; due again")
