"""`show`: everything that is known of one task, for whoever was woken by it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import click

from leasetask import client, protocol
from leasetask.cli.common import cli, dsn_option, emit, json_option, server_of
from leasetask.cli.render import duration, table
from leasetask.connection import connect, fetch
from leasetask.model import TaskView
from leasetask.protocol import ConsumedSignal

Record = dict[str, Any]

_SHOWN = 100
"""Characters of a value; --json has it all."""


@cli.command()
@click.argument("task_id", metavar="ID")
@dsn_option
@json_option
def show(task_id: str, dsn: str | None, as_json: bool) -> None:
    """Show one task: its state, lease, steps, effects, waits, signals and last error.

    Example: leasetask show 0190…
    """
    id_ = client.task_id(task_id)
    with connect(server_of(dsn)) as conn:
        view = client.run(client.get(id_), lambda query: fetch(conn, query), id_)
        ((records, open_steps, waiting_since, wait_until, pruned_at, now),) = fetch(
            conn, protocol.steps(id_)
        )
        numbers = [r["signal"] for r in records.values() if r.get("signal") is not None]
        signals = [ConsumedSignal(*row) for row in fetch(conn, protocol.signals(numbers))]
    ordered = dict(sorted(records.items(), key=lambda item: int(item[1]["n"])))
    if as_json:
        wait = {"waiting_since": waiting_since, "wait_until": wait_until, "pruned_at": pruned_at}
        more = {"records": ordered, "open_steps": open_steps, **wait}
        emit(asdict(view) | more | {"signals": [s._asdict() for s in signals]}, True, "")
        return
    lines = [f"{view.kind} v{view.version}  {view.id}"]
    facts = [*_state(view, now), *_wait(view, waiting_since, wait_until, now), *_rest(view)]
    if pruned_at is not None:
        facts.append(("pruned", f"{_ago(pruned_at, now)}: input, state and result are gone"))
    width = max(len(name) for name, _ in facts)
    lines += [f"{name:<{width}}  {value}" for name, value in facts]
    lines += _steps(ordered, open_steps)
    lines += _signals(signals, now)
    lines += _error(view)
    click.echo("\n".join(lines))


def _state(view: TaskView, now: datetime) -> Iterator[tuple[str, str]]:
    status: str = view.status
    if view.lease_until is not None:
        left = (view.lease_until - now).total_seconds()
        lease = f"ends in {duration(left)}" if left > 0 else f"RAN OUT {duration(-left)} ago"
        status += f" on {view.lease_owner}; its lease {lease}"
    elif view.finished_at is not None:
        status += f" {_ago(view.finished_at, now)}"
    yield "status", status
    since = " since the last progress" if view.steps else ""
    yield (
        "tries",
        f"{view.attempts} of {view.max_attempts}{since}; claimed {view.runs} times in all",
    )
    if view.finished_at is None and view.status != "running":
        due = "when it is signalled" if view.next_run_at is None else _ago(view.next_run_at, now)
        yield "next run", due
    if view.cancel_requested_at is not None:
        reason = f": {view.cancel_reason}" if view.cancel_reason else ""
        yield "cancel", f"asked for {_ago(view.cancel_requested_at, now)}{reason}"
    if view.deadline is not None:
        yield "deadline", _ago(view.deadline, now)
    if view.step_since is not None:
        yield "does", f"{view.current_step}, for {_lasts(view.step_since, now)}"
    if view.progress is not None:
        fraction = view.progress.get("fraction")
        share = "" if fraction is None else f"{fraction:.0%}  "
        yield "progress", share + (view.progress.get("message") or "")


def _wait(
    view: TaskView, since: datetime | None, until: datetime | None, now: datetime
) -> Iterator[tuple[str, str]]:
    if view.status == "waiting" and since is not None:
        what = f"topic {view.wait_topic}" if view.wait_topic else "a time"
        end = f", until {_ago(until, now)}" if until is not None else ", without end"
        yield "waits for", f"{what}, as {view.current_step}, for {_lasts(since, now)}{end}"


def _rest(view: TaskView) -> Iterator[tuple[str, str]]:
    yield "enqueued", _exact(view.created_at)
    if view.key != view.id:
        yield "key", view.key
    if view.priority:
        yield "priority", str(view.priority)
    yield "input", _short(view.input)
    if view.status == "succeeded":
        yield "result", _short(view.result)


def _steps(records: dict[str, Record], open_steps: dict[str, Record]) -> Iterator[str]:
    rows = [
        (
            record["n"],
            name,
            _outcome(record),
            _effect(record),
            record.get("tries", 1),
            _took(record),
        )
        for name, record in records.items()
    ]
    rows += [
        ("-", name, _open(known), _effect(known), known.get("tries", "-"), "-")
        for name, known in open_steps.items()
    ]
    if rows:
        yield ""
        yield table(("N", "STEP", "OUTCOME", "EFFECT", "TRIES", "TOOK"), rows)


def _outcome(record: Record) -> str:
    if "error" in record:
        return f"failed: {record['error']['type']}: {record['error']['message']}"[:_SHOWN]
    if "timeout" in record:
        return "its time came"
    if "cancelled" in record:
        return "cancelled"
    return _short(record.get("ok"))


def _open(known: Record) -> str:
    if "error" in known:
        return f"begun; last: {known['error']['type']}: {known['error']['message']}"[:_SHOWN]
    return "begun, not recorded"


def _effect(record: Record) -> str:
    if "started" not in record:
        return "-"
    return f"started {record['started']}, ended {record.get('ended', 0)}"


def _took(record: Record) -> str:
    return (
        "<1 ms" if "ms" not in record and "ok" in record else duration(record.get("ms", 0) / 1000)
    )


def _signals(signals: list[ConsumedSignal], now: datetime) -> Iterator[str]:
    if signals:
        rows = [(s.id, s.topic, _ago(s.sent_at, now), _short(s.payload)) for s in signals]
        yield ""
        yield table(("SIGNAL", "TOPIC", "SENT", "PAYLOAD"), rows)


def _error(view: TaskView) -> Iterator[str]:
    error = view.last_error
    if error is None:
        return
    ended_by_it = view.status in ("failed", "dead")
    past = "" if ended_by_it else ", of an earlier try"
    yield ""
    yield f"last error{past} (try {error.get('attempt', '?')}, {error.get('at', '?')})"
    short = f"{error.get('type')}: {error.get('message')}"
    yield short if view.status == "succeeded" else (error.get("traceback") or short).rstrip()


def _ago(moment: datetime, now: datetime) -> str:
    seconds = (moment - now).total_seconds()
    words = f"in {duration(seconds)}" if seconds > 0 else f"{duration(-seconds)} ago"
    return f"{words} ({_exact(moment)})"


def _lasts(since: datetime, now: datetime) -> str:
    return f"{duration((now - since).total_seconds())} (since {_exact(since)})"


def _exact(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"
