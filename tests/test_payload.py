"""Data: exact, or refused where it is given, with the path of what is wrong (H30, H31, H33)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, TypedDict

import msgspec
import psycopg
import pydantic
import pytest
from helpers import FAST, ended, working
from hypothesis import given
from hypothesis import strategies as st

from leasetask import App, Context, PayloadError
from leasetask.payload import decode, encode, printable

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Equality that tells True from 1, but not 1e16 from the integer that jsonb makes of it."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b and isinstance(a, bool) == isinstance(b, bool)


@pytest.fixture(scope="module")
def jsonb(databases):
    with databases.fresh() as dsn, psycopg.connect(dsn, autocommit=True) as db:
        yield lambda text: db.execute("select %s::jsonb::text", [text]).fetchone()[0]


@given(value=JSON)
def test_any_json_is_kept_exactly_or_refused(jsonb, value: Any) -> None:
    """What encode takes, jsonb takes, and gives back equal, of the type that the first run saw."""
    try:
        text = encode(value, what="it")
    except PayloadError as error:
        assert "it" in str(error)
        return
    first_run, replay = decode(text, what="it"), decode(jsonb(text), what="it")
    assert same(first_run, value)
    assert repr(first_run) == repr(replay) or same(first_run, replay)
    assert type(first_run) is type(replay)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("a\x00b", "$"),
        ({"a": ["b", "\x00"]}, "$.a[1]"),
        ({"\x00": 1}, "$"),
        ({"a": "\ud800"}, "$.a"),
        ([1, math.nan], "$[1]"),
        ({"x": {"y": math.inf}}, "$.x.y"),
        ({1: 2}, "$"),
        ((1, 2), "$"),
        ({"d": Decimal("1.5")}, "$.d"),
        ([datetime.now(UTC)], "$[0]"),
        ({"b": b"bytes"}, "$.b"),
        ({1, 2}, "$"),
    ],
)
def test_what_json_would_change_is_refused_with_its_path(value: Any, path: str) -> None:
    with pytest.raises(PayloadError, match="^it: ") as refused:
        encode(value, what="it")
    assert f" {path} " in str(refused.value)


def test_six_harmless_characters_pass() -> None:
    """Backslash, u and four zeros as text are no NUL."""
    text = encode("\\u0000", what="it")
    assert decode(text, what="it") == "\\u0000"


@pytest.mark.parametrize(
    ("value", "type_"),
    [
        (Decimal("12345678901234567890.123456789"), Decimal),
        (datetime(2026, 11, 29, 12, 0, tzinfo=UTC), datetime),
        (date(2026, 11, 29), date),
        (b"\x00\xff", bytes),
        (2**53 + 1, int),
        (2**64, int),
        (-(2**70), int),
        (1e16, float),
        (1e300, float),
        ((1, "a"), tuple[int, str]),
        ({1: "a"}, dict[int, str]),
        ({"a"}, set[str]),
    ],
)
def test_annotated_values_come_back_as_they_were(jsonb, value: Any, type_: Any) -> None:
    text = encode(value, type_, what="it")
    for stored in (text, jsonb(text)):
        found = decode(stored, type_, what="it")
        assert found == value
        assert type(found) is type(value)


@dataclass
class Plain:
    id: int
    names: list[str]


class Typed(TypedDict):
    id: int


class Struct(msgspec.Struct):
    id: int


class Model(pydantic.BaseModel):
    id: int


@pytest.mark.parametrize(
    "value", [Plain(1, ["a"]), Struct(1), Model(id=1)], ids=["dataclass", "struct", "pydantic"]
)
def test_inputs_and_results_keep_their_type_through_a_task(dsn: str, value: Any) -> None:
    app, seen = App(dsn), []
    annotation = type(value)

    def handler(ctx: Context, thing: annotation) -> annotation:
        def body():
            return thing

        body.__annotations__ = {"return": annotation}
        first = ctx.step("same", body)
        if not seen:
            seen.append(first)
            raise RuntimeError("replay")
        seen.append(first)
        return first

    handler.__annotations__ = {"ctx": Context, "thing": annotation, "return": annotation}
    app.task(retry=FAST)(handler)
    view = ended(app, handler, value)
    assert view.status == "succeeded", view.last_error
    assert seen[0] == seen[1] == value or (seen[0].id, seen[1].id) == (1, 1)
    assert [type(s) for s in seen] == [annotation] * 2
    assert view.result["id"] == 1


@pytest.mark.parametrize(
    ("annotation", "value"),
    [(Plain, {"id": "x", "names": []}), (Typed, {"id": None}), (Model, {"id": "x"}), (int, "1")],
)
def test_an_input_that_does_not_fit_is_refused_and_nothing_is_written(
    dsn: str, db: psycopg.Connection, annotation: Any, value: Any
) -> None:
    app = App(dsn)

    def handler(ctx: Context, thing: annotation) -> None: ...

    handler.__annotations__ = {"thing": annotation}
    app.task(handler)
    with pytest.raises(PayloadError, match="input of handler"):
        app.enqueue(handler, value)
    with pytest.raises(PayloadError, match=r"input of handler \[0\]"):
        app.enqueue_many(handler, [value])
    assert db.execute("select count(*) from leasetask.task").fetchone() == (0,)


def test_a_payload_over_the_limit_names_both_sizes(dsn: str) -> None:
    app = App(dsn, payload_limit=100)

    @app.task
    def handler(ctx: Context, text: str) -> None: ...

    with pytest.raises(PayloadError, match="203 bytes of JSON; the limit is 100"):
        app.enqueue(handler, "é" * 100 + "x")


@pytest.mark.parametrize("where", ["step", "result", "progress", "error", "signal"])
def test_a_nul_anywhere_spoils_nothing_else(dsn: str, where: str) -> None:
    """H30: refused at the call, or escaped; the task still ends, and so does its neighbour."""
    app = App(dsn)

    @app.task(retry=FAST)
    def bad(ctx: Context) -> str:
        if where == "step":
            ctx.step("s", lambda: "\x00")
        if where == "progress":
            ctx.progress(0.5, "half\x00way\ud800")
        if where == "error":
            raise ValueError("nul \x00 and \ud800")
        if where == "signal":
            app.signal("topic", {"x": "\x00"})
        return "\x00" if where == "result" else "fine"

    @app.task
    def good(ctx: Context) -> str:
        return "fine"

    tasks = [app.enqueue(bad), app.enqueue(good)]
    with working(app):
        views = [app.wait(task.id, timeout=10) for task in tasks]
    assert views[1].result == "fine"
    assert views[0].status == ("succeeded" if where == "progress" else "failed")
    if where == "error":
        assert views[0].last_error["message"] == "nul \\u0000 and \\ud800"


@pytest.mark.parametrize("told", [("half", None), (0.5, 7), ([1], "x")])
def test_a_progress_that_is_none_is_refused_at_the_call(dsn: str, told: tuple[Any, Any]) -> None:
    """And not in the heartbeat, which every other task needs."""
    app = App(dsn)

    @app.task(retry=FAST)
    def handler(ctx: Context) -> None:
        ctx.progress(*told)

    view = ended(app, handler)
    assert view.status == "failed"
    assert view.last_error["type"] == "PayloadError"
    assert view.last_error["message"].startswith("progress(")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("error", [Unprintable(), ValueError("x" * 10_000_000)])
def test_any_exception_is_recorded_and_cut(dsn: str, error: Exception) -> None:
    """H33: one whose str() raises, and one with 10 MB of text."""
    app = App(dsn)

    @app.task(retry=FAST)
    def handler(ctx: Context) -> None:
        raise error

    view = ended(app, handler)
    assert view.status == "failed"
    assert view.last_error["type"] == type(error).__name__
    assert len(str(view.last_error)) < 30_000


def test_printable_is_what_jsonb_takes(jsonb) -> None:
    text = printable("".join(map(chr, range(300))) + "\ud800\udfff")
    assert decode(jsonb(msgspec.json.encode(text).decode()), what="it") == text
