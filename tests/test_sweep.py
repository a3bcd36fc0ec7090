"""The sweep where rows stand in its way, and notifications where names are long."""

from __future__ import annotations

import json

import psycopg

REFUSE = """
create function refuse() returns trigger language plpgsql as $$
begin
  if old.idempotency_key like 'bad%' and new.status <> 'running' then
    raise exception 'this row cannot be recovered';
  end if;
  return new;
end $$;
create trigger refuse before update on leasetask.task for each row execute function refuse();
"""


def test_h11_what_cannot_be_recovered_stops_nobody(db: psycopg.Connection) -> None:
    """H11: more expired leases than one batch, a whole page of them raising: the rest is recovered."""
    for name in ("bad", "good"):
        db.execute(
            "select leasetask.enqueue_many('k', array(select to_jsonb(i) from generate_series(1, 60) i),"
            " array(select %s || i from generate_series(1, 60) i))",
            [name],
        )
        db.execute("select leasetask.claim(%s, array['k'], array[1], 60, '30s')", [f"dead {name}"])
    db.execute("update leasetask.task set lease_until = now() - interval '1 second'")
    db.execute(REFUSE)
    recovered: set[str] = set()
    for _ in range(5):
        rows = db.execute("select id::text, outcome, error from leasetask.sweep(50)").fetchall()
        recovered |= {id for id, outcome, _ in rows if outcome == "recovered"}
        assert {e for _, outcome, e in rows if outcome == "error"} <= {
            "this row cannot be recovered"
        }
    good = "select count(*) from leasetask.task where status = 'pending' and idempotency_key like 'good%'"
    assert len(recovered) == 60
    assert db.execute(good).fetchone() == (60,)


def test_h29_a_megabyte_and_long_names_never_break_the_notification(
    dsn: str, db: psycopg.Connection
) -> None:
    """H29: what is notified is a word, whatever the task's kind, key, topic and input are."""
    db.execute("select leasetask.set_idle('someone', true)")
    kind, long = "k" * 500, "t" * 1000
    with psycopg.connect(dsn, autocommit=True) as listener:
        listener.execute("listen leasetask")
        big = json.dumps("x" * 1_000_000)
        db.execute("select leasetask.enqueue(%s, %s::jsonb, %s)", [kind, big, long])
        db.execute("select leasetask.signal(%s, %s::jsonb)", [long, big])
        heard = [n.payload for n in listener.notifies(timeout=5, stop_after=2)]
    assert heard == ["task", "signal"]
