"""What the commands share: the group, their options, how they print and how they fail."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import click
import msgspec

from leasetask import client
from leasetask.connection import connect, dsn_or_environment, fetch
from leasetask.errors import DatabaseUnavailable, PayloadError

REFUSED, USAGE, NO_SERVER = 1, 2, 3
"""Exit statuses; 0 is done."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="leasetask")
def cli() -> None:
    """Durable tasks in your own PostgreSQL.

    Exit status: 0 done, 1 refused or not found, 2 usage, 3 no server.
    """


def leave(message: str, status: int) -> NoReturn:
    """End the command with one line on stderr."""
    click.echo(f"leasetask: {message}", err=True)
    sys.exit(status)


def dsn_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --dsn."""
    return click.option(
        "--dsn", metavar="DSN", help="PostgreSQL to use; LEASETASK_DSN by default."
    )(command)


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def embedded_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --embedded, for chores that never start a server unasked."""
    return click.option(
        "--embedded", is_flag=True, help="Without a DSN, start the project's own server."
    )(command)


def server_of(dsn: str | None, *, embedded: bool = True) -> str:
    """Return the DSN to use; a chore without its environment must not sweep an empty database."""
    known = dsn_or_environment(dsn)
    if known is not None:
        return known
    from leasetask import embedded as launcher  # noqa: PLC0415  # an extra

    if not embedded and not launcher.default_folder().exists():
        raise DatabaseUnavailable(
            "no database given: set LEASETASK_DSN, or --dsn, or ask for --embedded"
        )
    return launcher.ensure()


def ask(dsn: str, call: client.Call[client.T], task_id: str | None = None) -> client.T:
    """Run a producers' call on a connection of its own."""
    with connect(dsn) as conn:
        return client.run(call, lambda query: fetch(conn, query), task_id)


def emit(value: Any, as_json: bool, text: str) -> None:
    """Print a value as JSON, or its text."""
    click.echo(msgspec.json.encode(value, enc_hook=str).decode() if as_json else text)


def parse_json(text: str, what: str) -> Any:
    """Read an argument as JSON; raises PayloadError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"{what} is not JSON: {error}") from None
