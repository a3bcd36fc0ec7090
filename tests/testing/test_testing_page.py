"""docs/testing.md is run: its tests as pytest runs them, and its report as it is printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "testing.md"
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

HISTORY = {
    "id": "0190163d-8694-739b-aea5-966c26f8ad90",
    "kind": "pay_once",
    "version": 1,
    "key": "order-1",
    "status": "running",
    "input": 30,
    "records": {"charge": {"n": 1, "ok": "receipt", "started": 1, "ended": 1}},
    "open_steps": {},
}


def blocks(language: str) -> list[str]:
    return [code for kind, code in BLOCK.findall(DOCS.read_text()) if kind == language]


@pytest.fixture(scope="module")
def page(leasetask_databases: object, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest says of the page."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "test_page.py").write_text("\n\n".join(blocks("python")))
    (folder / "histories").mkdir()
    (folder / "histories" / "paying.json").write_text(json.dumps(HISTORY))
    environment = {**os.environ, "LEASETASK_TEST_DSN": leasetask_databases.dsn_of("postgres")}  # type: ignore[attr-defined]
    environment.pop("LEASETASK_DSN", None)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-rA",
            "--tb=short",
            "test_page.py",
        ],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout + done.stderr


def test_only_the_wrong_handler_fails(page: str) -> None:
    assert re.findall(r"^FAILED \S+::(\w+)", page, re.MULTILINE) == ["test_paying_survives"], page
    assert len(re.findall(r"^PASSED ", page, re.MULTILINE)) == 7, page


def test_the_report_is_what_the_page_prints(page: str) -> None:
    lines = [line.removeprefix("E   ").strip() for line in page.splitlines()]
    (report,) = blocks("text")
    for line in report.splitlines():
        assert any(line.strip() in told for told in lines), f"{line}\n\nnot in\n\n{page}"
