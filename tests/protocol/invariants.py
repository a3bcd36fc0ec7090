"""What must hold of the rows whenever nobody is in the middle of anything (design, section 7)."""

from __future__ import annotations

from calls import Session

_RECORDS = """
with record as (
  select t.id, e.key as name, e.value as record
  from leasetask.task t cross join lateral jsonb_each(t.state) e
  union all
  select s.task_id, s.name, s.record from leasetask.task_step s
)
"""

_AT_ANY_TIME = {
    "a task is lost: neither due, nor waiting with a time or a topic, nor leased with an end": """
        select id::text from leasetask.task
        where (status = 'pending' and next_run_at = 'infinity')
           or (status = 'waiting' and next_run_at = 'infinity' and wait_topic is null)
           or (status = 'running' and lease_until = 'infinity')""",
    "two tasks hold one token": """
        select lease_token::text from leasetask.task
        where lease_token is not null group by 1 having count(*) > 1""",
    "the attempts are over the budget": """
        select id::text from leasetask.task where attempts > max_attempts""",
    "a cancel is forgotten": """
        select id::text from leasetask.task
        where status in ('pending', 'waiting') and cancel_requested_at is not null
          and compensating is null""",
    "a mark on what does not wait": """
        select id::text from leasetask.task
        where undelivered and (status <> 'waiting' or wait_topic is null)""",
    "a wait that has no mode": """
        select id::text from leasetask.task
        where wait_mode is null and coalesce(wait_name, wait_topic, wait_until::text) is not null""",
    "a signal is recorded by two tasks, or by one that did not consume it": """
        select r.id::text from record r
        join leasetask.task_signal s on s.id = (r.record ->> 'signal')::bigint
        where not s.sticky and s.consumed_by is distinct from r.id""",
    "a signal is consumed and its consumer has no record of it": """
        select s.id::text from leasetask.task_signal s
        join leasetask.task t on t.id = s.consumed_by and t.pruned_at is null
        where not exists (select from record r
                          where r.id = t.id and (r.record ->> 'signal')::bigint = s.id)""",
    "a step is recorded twice": """
        select r.id::text || r.name from record r group by r.id, r.name having count(*) > 1""",
    "the stored steps are counted wrong": """
        select t.id::text from leasetask.task t
        where t.stored_steps <> (select count(*) from leasetask.task_step s where s.task_id = t.id)""",
}

_ONCE_DELIVERED = {
    "a waiter sleeps beside a signal": """
        select t.id::text from leasetask.task t
        where t.wait_mode = 'signal' and exists (
          select from leasetask.task_signal s where s.topic = t.wait_topic and s.consumed_by is null)""",
    "a wait_for sleeps beside a signal that is newer than its check": """
        select t.id::text from leasetask.task t
        where t.wait_mode = 'hurry' and exists (
          select from leasetask.task_signal s
          where s.topic = t.wait_topic and not pg_visible_in_snapshot(s.xid, t.wait_snapshot))""",
    "something is marked that everybody has looked at": """
        select topic from leasetask.undelivered_topics() as topic""",
}


def _query(checks: dict[str, str]) -> str:
    parts = (f"(select %s, array(select x from ({sql}) as q (x)))" for sql in checks.values())
    return _RECORDS + " union all ".join(parts)


_ANY_TIME_QUERY = _query(_AT_ANY_TIME)
_ALL = _AT_ANY_TIME | _ONCE_DELIVERED
_ALL_QUERY = _query(_ALL)


def check(session: Session) -> None:
    """Fail if something does not hold that always must."""
    _fail_for(session.rows(_ANY_TIME_QUERY, *_AT_ANY_TIME))


def check_delivered(session: Session) -> None:
    """Deliver what nobody has looked at, as any worker does, and fail if something does not hold."""
    session.deliver_all()
    _fail_for(session.rows(_ALL_QUERY, *_ALL))


def _fail_for(rows: list[tuple[str, list[str]]]) -> None:
    broken = [f"{name}: {', '.join(ids)}" for name, ids in rows if ids]
    assert not broken, "; ".join(broken)
