"""`outbox install`, `dispatch`, `prune`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click

from leasetask import outbox, schema
from leasetask.cli.common import (
    REFUSED,
    cli,
    dsn_option,
    embedded_option,
    emit,
    json_option,
    server_of,
)
from leasetask.errors import DatabaseUnavailable


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
@click.option(
    "--every",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    help="Seconds between rounds.",
)
@dsn_option
@embedded_option
@json_option
def dispatch(
    business: str, once: bool, every: float, dsn: str | None, embedded: bool, as_json: bool
) -> None:
    """Enqueue what is pending in the outbox, for ever or --once.

    Exit status 1 if rows were refused: their error says why.
    Example: leasetask outbox dispatch --from postgresql://localhost/shop --once
    """
    server = server_of(dsn, embedded=embedded)
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
                emit(asdict(done), as_json, text)
            if once:
                sys.exit(REFUSED if done.refused else 0)
        time.sleep(every)


@outbox_group.command(name="prune")
@_business_option
@click.option(
    "--older-than",
    type=click.FloatRange(min=0),
    default=7.0,
    show_default=True,
    help="Days since the dispatch.",
)
@json_option
def outbox_prune(business: str, older_than: float, as_json: bool) -> None:
    """Delete dispatched rows.

    Example: leasetask outbox prune --from postgresql://localhost/shop --older-than 3
    """
    count = outbox.prune(business, older_than * 86400)
    emit({"deleted": count}, as_json, f"{count} rows deleted")
