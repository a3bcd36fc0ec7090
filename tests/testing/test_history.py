"""Stored histories against changed handlers: in a test, and before a deploy."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leasetask import App, AsyncContext, Context, NonRetryable, Retry
from leasetask.errors import ReplayError
from leasetask.testing import Engine, History, replay

COMMAND = Path(sysconfig.get_path("scripts")) / "leasetask"


def command(dsn: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments],
        env={**os.environ, "LEASETASK_DSN": dsn},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def history(
    records: dict[str, Any], *, status: str = "waiting", waits_at: str | None = None, **more: Any
) -> dict[str, Any]:
    """What `leasetask export` would write, with `{"name": value}` for each recorded step."""
    return {
        "id": "0190163d-8694-739b-aea5-966c26f8ad90",
        "kind": "publish",
        "version": 1,
        "key": "order-1",
        "status": status,
        "input": {"id": 1},
        "records": {
            name: {"n": n, **(value if isinstance(value, dict) else {"ok": value})}
            for n, (name, value) in enumerate(records.items(), start=1)
        },
        "open_steps": {},
        "compensating": None,
        "waits_at": waits_at,
        **more,
    }


def never(*_: Any) -> Any:
    raise AssertionError("a replay runs no body")


def publish(ctx: Context, order: dict[str, int]) -> str:
    pdf: str = ctx.step("render", never)
    ctx.transaction("mark", never)
    paid = ctx.wait_signal("paid", name="payment", timeout=60)
    ctx.effect("ship", never, never)
    return f"{pdf} {paid}"


async def publish_async(ctx: AsyncContext, order: dict[str, int]) -> str:
    pdf: str = await ctx.step("render", never)
    await ctx.transaction("mark", never)
    paid = await ctx.wait_signal("paid", name="payment", timeout=60)
    await ctx.effect("ship", never, never)
    return f"{pdf} {paid}"


STANDS = {
    "before its first step": history({}, status="pending"),
    "in the middle": history({"render": "a.pdf"}, status="running"),
    "at its wait": history({"render": "a.pdf", "mark": None}, waits_at="payment"),
    "at an effect begun": history(
        {"render": "a.pdf", "mark": None, "payment": "card"},
        status="running",
        open_steps={"ship": {"started": 1, "token": "t"}},
    ),
    "finished": history(
        {"render": "a.pdf", "mark": None, "payment": "card", "ship": None}, status="succeeded"
    ),
}


@pytest.mark.parametrize("handler", [publish, publish_async])
@pytest.mark.parametrize("where", STANDS)
def test_an_unchanged_handler_passes_wherever_the_task_stands(
    handler: Callable[..., Any], where: str
) -> None:
    replay(handler, STANDS[where])
    replay(handler, History(**STANDS[where]))


def renamed(ctx: Context, order: Any) -> None:
    ctx.step("draw", never)
    ctx.transaction("mark", never)
    ctx.wait_signal("paid", name="payment")


def put_in_between(ctx: Context, order: Any) -> None:
    ctx.step("render", never)
    ctx.step("stamp", never)
    ctx.transaction("mark", never)
    ctx.wait_signal("paid", name="payment")


def left_out(ctx: Context, order: Any) -> str:
    ctx.step("render", never)
    return "done"


def raises(ctx: Context, order: Any) -> None:
    pdf: Any = ctx.step("render", never)
    ctx.transaction("mark", never)
    ctx.wait_signal("paid", name=pdf["title"])


def other_type(ctx: Context, order: Any) -> None:
    def render() -> int:
        return 1

    ctx.step("render", render)


def other_arguments(ctx: Context, order: Any) -> None:
    ctx.step("render", never, "in colour")
    ctx.transaction("mark", never)
    ctx.wait_signal("paid", name="payment")


async def left_out_async(ctx: AsyncContext, order: Any) -> None:
    await asyncio.gather(ctx.step("render", never), ctx.step("stamp", never))


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (renamed, "came to 'draw', which is not recorded"),
        (put_in_between, "came to 'stamp'"),
        (left_out, "ended without asking for the recorded mark, payment"),
        (raises, "TypeError"),
        (other_type, "PayloadError"),
        (other_arguments, "'render' is asked for with other arguments"),
        (left_out_async, "came to 'stamp'"),
    ],
)
def test_a_changed_handler_is_found_out(handler: Callable[..., Any], words: str) -> None:
    with pytest.raises(ReplayError) as found:
        replay(handler, STANDS["at its wait"])
    assert words in str(found.value)
    assert "publish, waiting) would break" in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("where", ["in the middle", "finished"])
def test_one_is_found_out_in_the_middle_and_at_the_end(where: str) -> None:
    with pytest.raises(ReplayError, match="came to 'draw'"):
        replay(renamed, STANDS[where])


def test_an_inserted_step_and_an_appended_one_are_fine() -> None:
    def inserted(ctx: Context, order: Any) -> None:
        ctx.step("render", never)
        ctx.step("stamp", never, inserted=True)
        ctx.transaction("mark", never)
        ctx.wait_signal("paid", name="payment")

    def appended(ctx: Context, order: Any) -> None:
        ctx.step("render", never)
        ctx.transaction("mark", never)
        ctx.wait_signal("paid", name="payment")
        ctx.effect("ship", never, never)
        ctx.step("mail", never)

    replay(inserted, STANDS["at its wait"])
    replay(appended, STANDS["finished"])


def test_a_renamed_wait_would_break_once_its_signal_comes() -> None:
    def waits_elsewhere(ctx: Context, order: Any) -> None:
        ctx.step("render", never)
        ctx.transaction("mark", never)
        ctx.wait_signal("paid", name="paid")

    async def waits_elsewhere_async(ctx: AsyncContext, order: Any) -> None:
        await ctx.step("render", never)
        await ctx.transaction("mark", never)
        await ctx.wait_signal("paid", name="paid")

    for handler in (waits_elsewhere, waits_elsewhere_async):
        with pytest.raises(ReplayError, match=r"'paid', which is not recorded, without .* payment"):
            replay(handler, STANDS["at its wait"])


def test_branches_may_stand_at_different_places() -> None:
    async def branches(ctx: AsyncContext, order: Any) -> None:
        async def one() -> None:
            await ctx.step("a", never)
            await ctx.step("a2", never)

        async def other() -> None:
            await asyncio.sleep(0.01)
            await ctx.step("b", never)
            await ctx.effect("b2", never, never)

        async with asyncio.TaskGroup() as group:
            group.create_task(one())
            group.create_task(other())
            group.create_task(ctx.transaction("c", never))
        found = await asyncio.gather(one(), other(), return_exceptions=True)
        assert not found

    replay(branches, history({"a": 1, "b": 2}, status="running"))


def test_what_a_record_leads_to_is_no_breach() -> None:
    def declined(ctx: Context, order: Any) -> None:
        ctx.step("pay", never)

    def gives_up(ctx: Context, order: Any) -> None:
        if ctx.step("pay", never) == "declined":
            raise NonRetryable("declined")

    def raises_as_before(ctx: Context, order: Any) -> None:
        raise ValueError("as before")

    error = {"type": "ConnectionError", "message": "reset", "attempt": 5}
    replay(declined, history({"pay": {"error": error}}, status="pending"))
    replay(gives_up, history({"pay": "declined"}, status="pending"))
    replay(raises_as_before, history({}, status="failed"))


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_replay_runs_no_compensation(colour: str) -> None:
    def sync(ctx: Context, order: Any) -> None:
        ctx.step("reserve", never, compensate=never)
        ctx.wait_signal("paid")

    async def coroutine(ctx: AsyncContext, order: Any) -> None:
        await ctx.step("reserve", never, compensate=never)
        await ctx.wait_signal("paid")

    def registers_nothing(ctx: Context, order: Any) -> None:
        ctx.step("reserve", never)
        ctx.wait_signal("paid")

    compensating = history(
        {"reserve": {"ok": "1a", "compensate": True}}, status="pending", compensating="canceled"
    )
    replay({"sync": sync, "async": coroutine}[colour], compensating)
    with pytest.raises(ReplayError, match="compensations outstanding: reserve"):
        replay(registers_nothing, compensating)


def test_a_handler_that_waits_outside_of_steps_does_not_hang_the_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("leasetask.history._PATIENCE", 0.1)

    async def awaits(ctx: AsyncContext, order: Any) -> None:
        await asyncio.sleep(3600)

    def blocks(ctx: Context, order: Any) -> None:
        threading.Event().wait()

    for stuck in (awaits, blocks):
        with pytest.raises(ReplayError, match="does not end"):
            replay(stuck, STANDS["in the middle"])


def test_what_is_no_history_is_refused() -> None:
    with pytest.raises(ValueError, match="not what `leasetask export` writes"):
        replay(publish, {"id": "x"})


# --- with a database: export in production, replay in CI -----------------------------------------------

SHOP = """
from leasetask import App, AsyncContext, Context

app = App()

@app.task
def publish(ctx: Context, order: int) -> str:
    pdf = ctx.step({render!r}, lambda: f"{{order}}.pdf")
    ctx.wait_signal(f"paid:{{order}}", name={wait!r})
    return pdf

@app.task
def bill(ctx: Context, order: int) -> None:
    ctx.step("print", lambda: None)
    ctx.sleep(3600)
"""


@pytest.fixture
def shop(leasetask_db: str, tmp_path: Path) -> Callable[..., Path]:
    """Writes the module `shop`, as it is deployed or about to be."""

    def write(render: str = "render", wait: str = "payment") -> Path:
        (tmp_path / "shop.py").write_text(SHOP.format(render=render, wait=wait))
        return tmp_path

    namespace: dict[str, Any] = {}
    exec(compile(SHOP.format(render="render", wait="payment"), "shop", "exec"), namespace)
    with Engine(namespace["app"], leasetask_db) as engine:
        for order in (1, 2):
            engine.enqueue("publish", order, key=f"order-{order}")
        engine.enqueue("bill", 3, key="order-3")
        engine.drain()
        engine.signal("paid:2")
        engine.drain()
        engine.enqueue("publish", 4, key="order-4")
    return write


def id_of(dsn: str, key: str) -> str:
    found = command(dsn, "list", "--json")
    return next(t["id"] for t in json.loads(found.stdout) if t["key"] == key)


def test_an_export_is_replayed_by_a_test(leasetask_db: str, shop: Callable[..., Path]) -> None:
    for key in ("order-1", "order-2", "order-4"):
        done = command(leasetask_db, "export", id_of(leasetask_db, key))
        assert done.returncode == 0, done.stderr
        stored = json.loads(done.stdout)
        assert stored["key"] == key

        def handler(ctx: Context, order: int) -> str:
            pdf: str = ctx.step("render", never)
            ctx.wait_signal("paid", name="payment")
            return pdf

        replay(handler, stored)
    missing = command(leasetask_db, "export", "0190163d-8694-739b-aea5-966c26f8ad90")
    assert missing.returncode == 1
    assert "no task" in missing.stderr


def test_unfinished_tasks_are_checked_before_a_deploy(
    leasetask_db: str, shop: Callable[..., Path]
) -> None:
    same = command(leasetask_db, "replay", "shop:app", "--waiting", cwd=shop())
    assert (same.returncode, same.stdout) == (0, "2 checked, 0 would break\n"), same.stderr

    changed = command(leasetask_db, "replay", "shop:app", "--waiting", cwd=shop(render="draw"))
    assert changed.returncode == 1
    *broken, summary = changed.stdout.splitlines()
    assert summary == "2 checked, 1 would break"
    assert len(broken) == 1
    assert id_of(leasetask_db, "order-1") in broken[0]
    assert "NonDeterminismError" in broken[0]

    everything = command(leasetask_db, "replay", "shop:app", "--json", cwd=shop(render="draw"))
    told = json.loads(everything.stdout)
    assert (told["checked"], len(told["broken"])) == (3, 1)
    assert told["broken"][0]["kind"] == "publish"


def test_a_renamed_wait_is_found_before_a_deploy(
    leasetask_db: str, shop: Callable[..., Path]
) -> None:
    renamed = command(leasetask_db, "replay", "shop:app", "--waiting", cwd=shop(wait="paid"))
    assert renamed.returncode == 1
    assert "without asking for the recorded payment" in renamed.stdout


def test_running_tasks_are_checked_too(leasetask_db: str, tmp_path: Path) -> None:
    app = App(leasetask_db)

    @app.task(retry=Retry(max_attempts=3))
    def publish(ctx: Context, order: int) -> None:
        ctx.step("render", lambda: None)
        ctx.step("hold", lambda: app.enqueue("publish", 0, key="child") and None)
        (tmp_path / "shop.py").write_text(SHOP.format(render="draw", wait="payment"))
        for statuses, code in (("--running", 1), ("--waiting", 0)):
            done = command(leasetask_db, "replay", "shop:app", statuses, cwd=tmp_path)
            assert done.returncode == code, done.stdout

    with Engine(app, leasetask_db) as engine:
        task = engine.enqueue("publish", 0, key="child")
        engine.drain()
        engine.result(task)
