"""The `leasetask` command: thin over the library, one line for each mistake, never a traceback."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click
import psycopg

from leasetask.cli import history, look, outbox, show, tasks, upkeep, work
from leasetask.cli.common import NO_SERVER, REFUSED, USAGE, cli, leave
from leasetask.connection import is_disconnect, translated
from leasetask.errors import (
    ConfigurationError,
    DatabaseUnavailable,
    EmbeddedError,
    LeaseTaskError,
    PayloadError,
)

__all__ = ["cli", "history", "look", "main", "outbox", "show", "tasks", "upkeep", "work"]


def main() -> NoReturn:
    """Run the command and exit."""
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        leave("stopped", 130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except (DatabaseUnavailable, EmbeddedError) as error:
        leave(str(error), NO_SERVER)
    except (PayloadError, ConfigurationError, ValueError) as error:
        leave(str(error), USAGE)
    except LeaseTaskError as error:
        leave(str(error), REFUSED)
    except psycopg.Error as error:
        if is_disconnect(error):
            leave(f"the connection was lost: {' '.join(str(error).split())}", NO_SERVER)
        leave(str(translated(error) or " ".join(str(error).split())), REFUSED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)
