"""Each command is documented, and its example works as it stands in the help."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import psycopg
import pytest
from support import enqueue, wait_until

from leasetask import outbox
from leasetask.cli import cli

DOCS = Path(__file__).parent.parent / "docs"
SHOP = """
from leasetask import App, Context
app = App()

@app.task
def publish(ctx: Context, order: dict) -> str:
    return "published"
"""
FAILED = """
update leasetask.task set status = 'failed', attempts = 1, finished_at = now(), dead_letter_at = now(),
  open_steps = '{"add-torrent": {"started": 1, "token": "t"}}',
  last_error = '{"type": "EffectUnknown", "message": "nobody can tell", "step": "add-torrent"}'
where id = %s"""


def commands(group: click.Group = cli, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    """Give each command with its full name."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix}{name} ")
        elif not command.hidden:
            yield f"{prefix}{name}", command


COMMANDS = dict(commands())


def example_of(command: click.Command) -> str:
    found = re.search(
        r"Example: (?:\* \* \* \* \* LEASETASK_DSN=… )?(leasetask .*)", command.help or ""
    )
    assert found is not None, f"{command.name} has no example"
    return found[1]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_documented(name: str) -> None:
    """In the operator's page, with a help that says what it does and an example of it."""
    page = (DOCS / "operations.md").read_text()
    assert re.search(rf"^\| .*`{re.escape(name)}`.* \|", page, re.MULTILINE), name
    assert example_of(COMMANDS[name]).startswith(f"leasetask {name}")


@pytest.fixture
def shop(dsn: str, tmp_path: Path) -> dict[str, str]:
    """What the examples speak of: a shop's module, in a folder of its own."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "tasks.py").write_text(SHOP)
    (tmp_path / "tests").mkdir()
    (tmp_path / "Pictures").mkdir()
    (tmp_path / "Pictures" / "one.jpg").write_bytes(b"a picture")
    return {
        **os.environ,
        "LEASETASK_DSN": dsn,
        "HOME": str(tmp_path),
        "PYTHONPATH": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("worker", "top")])
def test_an_example_runs(
    name: str, shop: dict[str, str], dsn: str, db: psycopg.Connection, tmp_path: Path
) -> None:
    task = enqueue(db, "publish", {"id": 1}, key="order-0")
    db.execute(
        "select leasetask.declare_kinds(array['publish'], array[1], array[0::smallint], array[5],"
        " array[1::real], array[2::real], array[60::real], array[0.1::real], array[null::float8])"
    )
    if name == "resolve":
        db.execute(FAILED, [task])
    if name.startswith("outbox"):
        outbox.install(dsn)
    line = example_of(COMMANDS[name]).replace("0190…", task)
    line = line.replace("postgresql://localhost/shop", shlex.quote(dsn))
    done = subprocess.run(
        ["bash", "-euc", line], env=shop, cwd=tmp_path, capture_output=True, text=True, timeout=90,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr


def test_the_examples_of_worker_and_top_run(
    shop: dict[str, str], db: psycopg.Connection, tmp_path: Path
) -> None:
    """These two go on until they are stopped."""
    task = enqueue(db, "publish", {"id": 1})
    for name, ready in (("worker", "succeeded"), ("top", "0 running")):
        log = tmp_path / f"{name}.log"
        with log.open("w") as out:
            running = subprocess.Popen(
                shlex.split(example_of(COMMANDS[name])),
                env=shop,
                cwd=tmp_path,
                stdout=out,
                stderr=out,
            )
        try:
            wait_until(lambda log=log, ready=ready: ready in log.read_text(), 20, f"for {ready}")
        finally:
            running.send_signal(signal.SIGINT)
            running.wait(20)
        assert "Traceback" not in log.read_text()
    assert db.execute("select status from leasetask.task where id = %s", [task]).fetchone() == (
        "succeeded",
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_tab_completion(shell: str, shop: dict[str, str]) -> None:
    done = subprocess.run(
        ["leasetask"],
        env={**shop, "_LEASETASK_COMPLETE": f"{shell}_source"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "complete" in done.stdout or "compdef" in done.stdout, done.stderr
