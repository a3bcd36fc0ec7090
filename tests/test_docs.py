"""The documentation's blocks are run: what it shows, works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str) -> list[str]:
    return [code for kind, code in BLOCK.findall((DOCS / page).read_text()) if kind == language]


@pytest.mark.parametrize("page", ["handlers.md", "protocol.md"])
def test_a_pages_python_runs(page: str, dsn: str, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page, "python")))
    environment = {**os.environ, "LEASETASK_DSN": dsn}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_pages_commands_run(dsn: str) -> None:
    environment = {
        **os.environ,
        "LEASETASK_DSN": dsn,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    for block in blocks("handlers.md", "sh"):
        done = subprocess.run(
            ["bash", "-euc", block], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("example", ["sqlalchemy_shop.py", "django_shop.py"])
def test_an_example_runs(example: str, dsn: str) -> None:
    done = subprocess.run(
        [sys.executable, str(DOCS.parent / "examples" / example)],
        env={**os.environ, "LEASETASK_DSN": dsn},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split("\n")[:2] == ["succeeded", "paid: [True]"], done.stderr
