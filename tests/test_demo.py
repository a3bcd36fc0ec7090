"""`leasetask demo` and the example it runs: a kill in the middle, a bad copy, a cancel."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support import COMMAND, wait_until

from leasetask import App, Context, LeaseLost, demo, demo_ingest


def make_files(folder: Path, count: int) -> Path:
    for number in range(count):
        path = folder / f"folder {number % 3}" / f"ü {number}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([number]) * number * 1000)
    return folder


def number(output: str, row: str) -> float:
    """Return the number in a row of the demo's table."""
    found = re.search(rf"^{row} +([\d,.]+)", output, re.MULTILINE)
    assert found, f"no {row} in {output}"
    return float(found[1].replace(",", ""))


def test_a_killed_worker_loses_nothing_and_doubles_nothing(
    dsn: str, db: psycopg.Connection[Any], tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    ran = subprocess.run(
        [COMMAND, "demo", make_files(tmp_path / "in", 60), "--dsn", dsn],
        env={**os.environ, "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    out = ran.stdout
    assert (ran.returncode, ran.stderr) == (0, ""), ran
    assert "killed with SIGKILL, " in out
    cut_off = re.search(r"(\d+) of them again", out)
    assert number(out, "steps run") == 60 * 4 + (int(cut_off[1]) if cut_off else 0)
    assert number(out, "killed at") > 0
    assert 0 < number(out, "first recovered after") < 20
    for row in ("files", "tasks succeeded", "copies verified by hash"):
        assert number(out, row) == 60
    for row in ("lost", "duplicated"):
        assert number(out, row) == 0

    assert not list(scratch.iterdir())
    left = "select count(*) from leasetask.task union all select count(*) from leasetask.kind"
    assert db.execute(left).fetchall() == [(0,), (0,)]
    schemas = "select from pg_namespace where nspname like 'leasetask_demo%'"
    assert not db.execute(schemas).fetchall()


def test_it_fails_for_a_bad_copy_a_lost_file_and_a_doubled_row(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    look = demo.audit

    def meddle_and_look(
        site: demo.Site, conn: psycopg.Connection[Any], source: Path, files: list[str]
    ) -> demo.Audit:
        bad, lost, doubled, _ = [site.copies / name for name in files]
        bad.write_bytes(bad.read_bytes() + b"!")
        lost.unlink()
        conn.execute(
            "insert into ingested select * from ingested where target = %s",
            [str(doubled)],
        )
        return look(site, conn, source, files)

    monkeypatch.setattr(demo, "audit", meddle_and_look)
    monkeypatch.setattr(demo, "FEW", 0)  # without the pause that leaves time for the kill
    assert demo.run_demo(make_files(tmp_path, 4), dsn, keep=False) == 1
    out = capsys.readouterr().out
    assert (number(out, "copies verified by hash"), number(out, "tasks succeeded")) == (2, 4)
    assert (number(out, "lost"), number(out, "duplicated")) == (1, 1)
    assert "FAILED\n  folder 0/ü 0.bin: the copy differs from the file\n" in out
    assert "  folder 0/ü 3.bin: its task succeeded, but row or copy is missing\n" in out
    assert "the workers' last words:" in out


def test_each_fault_alone_makes_it_fail() -> None:
    right = demo.Audit(files=2, succeeded=2, verified=2, steps=8)
    assert right.passed
    assert not replace(right, verified=1).passed
    assert not replace(right, lost=1).passed
    assert not replace(right, duplicated=1).passed


def test_a_body_that_ran_again_is_told_from_one_that_was_cut_off(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    ledger.write_text("a hash\nb hash\na copy\na copy\nb copy\nb hash\na end\na end\n")
    assert demo.read_ledger(ledger) == (6, 1, 1)
    ledger.write_text("a hash\na end\na hash\n")
    assert demo.read_ledger(ledger) == (2, 0, 1)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    ran = subprocess.run([COMMAND, "demo", tmp_path], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == f"leasetask: no files to copy in {tmp_path}\n"


# --- the example ---------------------------------------------------------------------------------


def test_a_cancel_removes_the_partial_copy(
    dsn: str, db: psycopg.Connection[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "in", tmp_path / "out" / "copy"
    source.write_bytes(bytes(3 * demo_ingest.CHUNK))
    app, begun = App(dsn), threading.Event()
    app.task(demo_ingest.ingest)

    def progress(ctx: Context, fraction: float, message: str) -> None:
        assert (fraction, message) == (pytest.approx(1 / 3), "copy")
        assert [path.name for path in target.parent.iterdir()] == [f".{ctx.task_id}-1.part"]
        begun.set()
        wait_until(lambda: ctx.cancel_requested)

    monkeypatch.setattr(Context, "progress", progress)
    with app.start(lease=1):
        task = app.enqueue(demo_ingest.ingest, demo_ingest.Media(str(source), str(target)))
        assert begun.wait(10)
        assert app.cancel(task.id) == "requested"
        assert app.wait(task.id, timeout=10).status == "canceled"
    assert not list(target.parent.iterdir())


def test_a_copy_that_does_not_verify_is_taken_back(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "in", tmp_path / "out" / "copy"
    source.write_bytes(b"right")
    app = App(dsn)
    app.task(demo_ingest.ingest)
    digest = demo_ingest.digest

    def digest_of_a_bad_disk(ctx: Context, path: str) -> str:
        return digest(ctx, path) if path == str(source) else "wrong"

    monkeypatch.setattr(demo_ingest, "digest", digest_of_a_bad_disk)
    with app.start(lease=1):
        task = app.enqueue(demo_ingest.ingest, demo_ingest.Media(str(source), str(target)))
        view = app.wait(task.id, timeout=10)
    assert view.status == "failed"
    assert view.last_error and "differs from what was read" in view.last_error["message"]
    assert not list(target.parent.iterdir())


def test_a_run_that_lost_its_lease_leaves_the_next_ones_copy_alone(tmp_path: Path) -> None:
    """It removes its own partial copy and those of runs before it."""
    source, target = tmp_path / "in", tmp_path / "out" / "copy"
    source.write_bytes(b"right")
    target.parent.mkdir()
    for run in (1, 3):
        (target.parent / f".id-{run}.part").touch()

    class SecondRun:
        task_id, run = "id", 2

        def check(self) -> None:
            raise LeaseLost("too late")

    with pytest.raises(LeaseLost):
        demo_ingest.copy(SecondRun(), str(source), str(target))  # type: ignore[arg-type]
    assert [path.name for path in target.parent.iterdir()] == [".id-3.part"]


def test_the_example_enqueues_a_folder_and_later_what_is_new_in_it(
    dsn: str,
    db: psycopg.Connection[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    app = App(dsn)
    app.task(demo_ingest.ingest)
    monkeypatch.setattr(demo_ingest, "app", app)
    source = make_files(tmp_path / "in", 3)
    demo_ingest.main(source, tmp_path / "out")
    make_files(tmp_path / "in", 4)
    demo_ingest.main(source, tmp_path / "out")
    assert capsys.readouterr().out == "3 new of 3 files\n1 new of 4 files\n"
    with app.start():
        for (task,) in db.execute("select id::text from leasetask.task").fetchall():
            assert app.wait(task, timeout=10).status == "succeeded"
    copied = {path.name: path.read_bytes() for path in (tmp_path / "out").rglob("*.bin")}
    assert copied == {path.name: path.read_bytes() for path in source.rglob("*.bin")}
    app.close()
