"""`prune`, `pause`, `resume`: keeping an installation in shape."""

from __future__ import annotations

import sys

import click

from leasetask import protocol, schema
from leasetask.cli.common import (
    REFUSED,
    cli,
    dsn_option,
    embedded_option,
    emit,
    json_option,
    server_of,
)
from leasetask.cli.render import progress
from leasetask.connection import connect, fetch, first

_DAY = 86400.0


@cli.command()
@click.option(
    "--older-than",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Days since the end.",
)
@click.option(
    "--signals-older-than",
    type=click.FloatRange(min=0),
    default=90.0,
    show_default=True,
    help="Days, of unconsumed signals.",
)
@click.option("--forget-keys", is_flag=True, help="Delete whole rows: their keys are free again.")
@click.option(
    "--batch",
    type=click.IntRange(1),
    default=1000,
    show_default=True,
    help="Rows in one transaction.",
)
@dsn_option
@embedded_option
@json_option
def prune(
    older_than: float,
    signals_older_than: float,
    forget_keys: bool,
    batch: int,
    dsn: str | None,
    embedded: bool,
    as_json: bool,
) -> None:
    """Empty finished tasks of input, state and result, and delete consumed signals.

    A pruned task keeps its id, key, status and times, so its key keeps its meaning. Dead letters
    are pruned too: after so long nobody can retry them.
    Example: leasetask prune --older-than 7
    """
    server = server_of(dsn, embedded=embedded)
    schema.check(server)
    query = protocol.prune(older_than * _DAY, signals_older_than * _DAY, forget_keys, batch)
    total = 0
    with connect(server, name="leasetask prune") as conn, progress("pruned") as advance:
        while touched := first(fetch(conn, query)):
            total += touched
            advance(touched)
    emit({"rows": total}, as_json, f"{total} rows pruned")


def _set_paused(
    kind: str, version: int | None, paused: bool, dsn: str | None, as_json: bool
) -> None:
    server = server_of(dsn)
    schema.check(server)
    with connect(server) as conn:
        changed = first(fetch(conn, protocol.pause(kind, version, paused)))
    word = "paused" if paused else "resumed"
    text = f"{kind}: {changed} versions {word}" if changed else f"no worker has declared {kind}"
    emit({"kind": kind, "versions": changed}, as_json, text)
    if not changed:
        sys.exit(REFUSED)


@cli.command()
@click.argument("kind")
@click.option("--version", type=int, help="One version; all by default.")
@dsn_option
@json_option
def pause(kind: str, version: int | None, dsn: str | None, as_json: bool) -> None:
    """Claim no more tasks of KIND; what runs goes on.

    Example: leasetask pause publish
    """
    _set_paused(kind, version, True, dsn, as_json)


@cli.command()
@click.argument("kind")
@click.option("--version", type=int, help="One version; all by default.")
@dsn_option
@json_option
def resume(kind: str, version: int | None, dsn: str | None, as_json: bool) -> None:
    """Claim tasks of KIND again.

    Example: leasetask resume publish
    """
    _set_paused(kind, version, False, dsn, as_json)
