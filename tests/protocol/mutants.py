"""Broken copies of schema.sql, each with the check that must catch it and what that check says.

A mutant is made by replacing text. Each text must stand in schema.sql exactly once: one that does
not fails loudly, so that a mutant cannot turn into the unbroken schema unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import checks
import programs
from interleave import READ_COMMITTED, Program


class DoesNotApply(AssertionError):
    """The text to replace does not stand in schema.sql exactly once."""


@dataclass(frozen=True)
class Caught:
    """The check of a mutant: a story of one session, or a program of several.

    Attributes:
        says: a regular expression that the failure matches.
    """

    says: str
    check: checks.Check | None = None
    program: Callable[[], Program] | None = None
    gated: bool = False


@dataclass(frozen=True)
class Mutant:
    """One broken copy."""

    name: str
    replacements: tuple[tuple[str, str], ...]
    caught: Caught

    def apply(self, script: str) -> str:
        """Return the broken copy."""
        for old, new in self.replacements:
            if script.count(old) != 1:
                raise DoesNotApply(f"{self.name}: stands {script.count(old)} times: {old}")
            script = script.replace(old, new)
        return script


def story(says: str, check: checks.Check) -> Caught:
    return Caught(says, check=check)


def orders(says: str, program: Callable[[], Program]) -> Caught:
    return Caught(says, program=program)


def stops(says: str, program: Callable[[], Program]) -> Caught:
    return Caught(says, program=program, gated=True)


SLEEPS = "sleeps beside a signal"
TAKE_LOCK = "    for no key update of t skip locked\n  ) m on true;"
HELD = "coalesce(t.lease_token = i.token, false) as held"
LONE_LOCK = "from leasetask.task t where t.id = ids[1] for no key update skip locked;"
LONE_HELD = "select coalesce(t.lease_token = tokens[1], false),"
BATCHED = ("  if cardinality(ids) = 1 then  -- the same", "  if false then  -- the same")
"""Lone items go the way of a batch, so that a story of one task tests that way."""
BATCHED_CHECKPOINT = ("  if took.held = array[true] then", "  if false then")
WAITERS_LOCK = "cardinality(signals) else size end\n    for no key update nowait);"

MUTANTS = (
    # --- the twelve that the issue names ------------------------------------------------------
    Mutant(
        "no token check",
        (BATCHED, (HELD, "true as held")),
        story("heartbeat", checks.a_stale_token_is_refused),
    ),
    Mutant(
        "token check without a lock",
        (BATCHED, (TAKE_LOCK, "  ) m on true;")),
        stops("", lambda: programs.the_holder_is_stopped_while_it_is_swept("checkpoint")),
    ),
    Mutant(
        "attempts kept at each wake",
        (
            (
                "attempts = 0, swept = 0, suspect = false,\n      wait_mode = i.mode",
                "swept = 0, suspect = false,\n      wait_mode = i.mode",
            ),
        ),
        story("task_budget_is_kept|attempts == 1", checks.a_suspension_spends_no_attempt),
    ),
    Mutant(
        "delivery before the commit",
        (
            (
                "values (signal.topic, signal.payload, signal.sticky) returning s.id into made;",
                "values (signal.topic, signal.payload, signal.sticky) returning s.id into made;\n"
                "  perform leasetask.deliver(array[signal.topic]);",
            ),
        ),
        orders(
            SLEEPS,
            lambda: programs.a_signal_meets_a_task_that_goes_to_wait(
                READ_COMMITTED, True, "and delivers"
            ),
        ),
    ),
    Mutant(
        "delivery that skips locked waiters",
        ((WAITERS_LOCK, WAITERS_LOCK.replace("nowait", "skip locked")),),
        orders(
            f"{SLEEPS}|longest waiter",
            lambda: programs.a_cancel_meets_the_delivery(READ_COMMITTED, False, 2),
        ),
    ),
    Mutant(
        "consumption outside the transaction",
        (
            ("from pair p where s.id = p.signal", "from pair p where s.id = p.signal and false"),
            (
                "  if cardinality(chosen) > 0 then\n    return query\n",
                "  if cardinality(chosen) > 0 then\n"
                "    update leasetask.task_signal s set consumed_by = t.id, consumed_at = now_\n"
                "    from leasetask.task t where t.id = any (chosen)\n"
                "      and s.id = (t.state -> 'wait' ->> 'signal')::bigint;\n"
                "    return query\n",
            ),
        ),
        orders(
            "a signal is recorded by two tasks",
            lambda: programs.two_signals_meet_two_waiters(READ_COMMITTED, True),
        ),
    ),
    Mutant(
        "sweep without re-check",
        (
            (
                "where x.id = task and x.lease_until < now_ for no key update skip locked;",
                "where x.id = task for no key update skip locked;",
            ),
        ),
        stops(
            "",
            lambda: programs.the_sweep_is_stopped_while_the_holder_returns("heartbeat", "left"),
        ),
    ),
    Mutant(
        "key without input check",
        (
            (
                "when t.pruned_at is null and t.input = i.input then 'existing'",
                "when true then 'existing'",
            ),
        ),
        story("", checks.a_key_names_one_input),
    ),
    Mutant(
        "sticky consumed",
        (
            (
                "and s.consumed_by is null and not s.sticky\n    order by s.id limit size",
                "and s.consumed_by is null\n    order by s.id limit size",
            ),
            (
                "constraint signal_latch_is_not_consumed check (not sticky or consumed_by is null)",
                "constraint signal_latch_is_not_consumed check (true)",
            ),
        ),
        story("", checks.a_latch_serves_everyone),
    ),
    Mutant(
        "two results of one task in one batch",
        (
            (
                "if (select count(distinct i) from unnest(ids) i) < cardinality(ids) then",
                "if false then",
            ),
        ),
        story("not refused with LT004", checks.a_batch_holds_one_item_per_task),
    ),
    Mutant(
        "a checkpoint that overwrites",
        (
            BATCHED_CHECKPOINT,
            ("and not t.state ?| array(select jsonb_object_keys(i.patch))", "and true"),
        ),
        story("already", checks.a_recorded_step_never_changes),
    ),
    Mutant(
        "a heartbeat without skip locked",
        ((TAKE_LOCK, TAKE_LOCK.replace(" skip locked", "")),),
        orders(
            "blocked",
            lambda: programs.a_batch_of_heartbeats_meets_a_cancel(READ_COMMITTED, True),
        ),
    ),
    # --- and others ---------------------------------------------------------------------------
    Mutant(
        "a null token holds what is not running",
        (BATCHED, (HELD, "t.lease_token is not distinct from i.token as held")),
        story("heartbeat", checks.no_token_holds_nothing),
    ),
    Mutant(
        "no token check of a lone item",
        ((LONE_HELD, "select true,"),),
        story("heartbeat", checks.a_stale_token_is_refused),
    ),
    Mutant(
        "token check of a lone item without a lock",
        ((LONE_LOCK, "from leasetask.task t where t.id = ids[1];"),),
        stops("", lambda: programs.the_holder_is_stopped_while_it_is_swept("checkpoint")),
    ),
    Mutant(
        "a lone checkpoint that overwrites",
        (("and not t.state ?| names", "and true"),),
        story("already", checks.a_recorded_step_never_changes),
    ),
    Mutant(
        "a null token holds a lone item that is not running",
        ((LONE_HELD, "select t.lease_token is not distinct from tokens[1],"),),
        story("heartbeat", checks.no_token_holds_nothing),
    ),
    Mutant(
        "a token that stays the same",
        (("lease_token = gen_random_uuid(),", "lease_token = md5(t.id::text)::uuid,"),),
        story("", checks.tokens_are_new_at_every_claim),
    ),
    Mutant(
        "a finish that forgets its token",
        (
            (
                "      released_token = t.lease_token,\n"
                "      lease_owner = null, lease_until = null, lease_token = null,\n"
                "      abandoned = false,\n"
                "      updated_at = now_\n"
                "  from unnest(ids, results",
                "      lease_owner = null, lease_until = null, lease_token = null,\n"
                "      abandoned = false,\n"
                "      updated_at = now_\n"
                "  from unnest(ids, results",
            ),
        ),
        story("done", checks.a_repeated_end_hears_done),
    ),
    Mutant(
        "a sweep that remembers the token",
        (
            (
                "released_token = case when own then coalesce(t.lease_token, t.released_token)\n"
                "                            else t.released_token end",
                "released_token = coalesce(t.lease_token, t.released_token)",
            ),
        ),
        story("", checks.a_swept_worker_does_not_hear_done),
    ),
    Mutant(
        "a stored step is not looked for",
        (
            BATCHED_CHECKPOINT,
            (
                "and not t.state ?| array(select jsonb_object_keys(i.patch))\n"
                "      and (t.stored_steps = 0 or not exists (",
                "and not t.state ?| array(select jsonb_object_keys(i.patch))\n"
                "      and (true or not exists (",
            ),
        ),
        story("", checks.a_recorded_step_never_changes),
    ),
    Mutant(
        "a stored step is not looked for by a lone task",
        (
            (
                "and not t.state ?| names\n      and (t.stored_steps = 0 or not exists (",
                "and not t.state ?| names\n      and (true or not exists (",
            ),
        ),
        story("", checks.a_recorded_step_never_changes),
    ),
    Mutant(
        "a crash charges bystanders",
        (("company boolean := held > 1;", "company boolean := false;"),),
        story("suspect", checks.a_crash_takes_no_bystander_with_it),
    ),
    Mutant(
        "a lost owner's company is forgotten",
        (("held = greatest(o.held, excluded.held)", "held = excluded.held"),),
        story("suspect", checks.an_owner_found_with_fewer_was_not_alone),
    ),
    Mutant(
        "one bad row stops the sweep",
        (
            (
                "        swept_ := swept_ + 1;\n      exception when others then",
                "        swept_ := swept_ + 1;\n      exception when division_by_zero then",
            ),
        ),
        story("never", checks.a_row_that_cannot_be_recovered_stops_nothing),
    ),
    Mutant(
        "errors fill the sweep's batch",
        (
            (
                "        continue when outcome is null;\n        swept_ := swept_ + 1;\n"
                "      exception when others then\n"
                "        outcome := 'error'; error := sqlerrm;",
                "        continue when outcome is null;\n        swept_ := swept_ + 1;\n"
                "      exception when others then\n"
                "        swept_ := swept_ + 1; outcome := 'error'; error := sqlerrm;",
            ),
        ),
        story("", checks.a_row_that_cannot_be_recovered_stops_nothing),
    ),
    Mutant(
        "a timeout that is not recorded",
        (("case when t.wait_mode in ('sleep', 'signal')", "case when t.wait_mode in ('sleep')"),),
        story("", checks.a_timeout_replays_as_a_timeout),
    ),
    Mutant(
        "a suspension born delivered",
        (("undelivered = i.topic is not null,", "undelivered = false,"),),
        orders(
            SLEEPS,
            lambda: programs.a_signal_meets_a_task_that_goes_to_wait(
                READ_COMMITTED, True, "and dies"
            ),
        ),
    ),
    Mutant(
        "a signal born delivered",
        (
            (
                "undelivered  boolean not null default true,",
                "undelivered  boolean not null default false,",
            ),
        ),
        orders(
            SLEEPS,
            lambda: programs.a_signal_meets_a_task_that_goes_to_wait(
                READ_COMMITTED, True, "and dies"
            ),
        ),
    ),
    Mutant(
        "marks cleared while a round is full",
        (("if woken = 0 or not again then", "if true then"),),
        story(SLEEPS, checks.a_full_round_leaves_the_rest_to_the_next),
    ),
    Mutant(
        "marked waiters not looked at first",
        (
            (
                "  marked := array(\n"
                "    select t.id from leasetask.task t\n"
                "    where t.wait_topic = deliver_topic.topic and t.undelivered\n"
                "    limit size for no key update nowait);\n",
                "  marked := '{}';\n",
            ),
            (
                "  again := again or cardinality(fresh) >= size",
                "  marked := array(\n"
                "    select t.id from leasetask.task t\n"
                "    where t.wait_topic = deliver_topic.topic and t.undelivered\n"
                "    limit size for no key update nowait);\n"
                "  again := again or cardinality(fresh) >= size",
            ),
        ),
        stops(
            SLEEPS,
            lambda: programs.a_delivery_is_stopped(
                "a signal and its delivery, then a suspension", 0, 0
            ),
        ),
    ),
    Mutant(
        "waiters chosen first and locked afterwards",
        (
            (
                "  waiters := array(\n    select t.id from leasetask.task t\n    where t.wait_topic",
                "  waiters := array(\n    select z.id from leasetask.task z where z.id = any (array("
                "\n    select t.id from leasetask.task t\n    where t.wait_topic",
            ),
            (WAITERS_LOCK, WAITERS_LOCK.replace("\n    for", "))\n    for")),
        ),
        stops(
            f"{SLEEPS}|got 22023",
            lambda: programs.a_delivery_is_stopped("a cancel of the older waiter", 1, 2, rows=True),
        ),
    ),
    Mutant(
        "a signal that its check saw hurries",
        (
            (
                "s.xid >= pg_snapshot_xmin(t.wait_snapshot)\n"
                "                    and not pg_visible_in_snapshot(s.xid, t.wait_snapshot))",
                "true)",
            ),
        ),
        story("", checks.an_early_signal_does_not_hurry),
    ),
    Mutant(
        "a signal that clears the mark before it commits",
        (
            (
                "select p.woken into woken from leasetask.pair_topic(topic, 100) p;",
                "select p.woken into woken from leasetask.deliver_topic(topic) p;",
            ),
        ),
        stops(
            SLEEPS,
            lambda: programs.a_delivery_is_stopped(
                "a suspension and its delivery",
                0,
                0,
                mode="hurry",
                stopped=(programs.signal_now, (*programs.SIGNAL_NOW, *programs.DELIVERY)),
            ),
        ),
    ),
    Mutant(
        "the newest waiter first",
        (
            (
                "order by t.waiting_since, t.id\n    limit case",
                "order by t.waiting_since desc, t.id\n    limit case",
            ),
        ),
        story("", checks.the_longest_waiter_is_served_first),
    ),
    Mutant(
        "a suspension that overlooks a cancel",
        (
            ("u.held and not u.cancel as held", "u.held as held"),
            ("  if true = any (cancel) then\n    canceled", "  if false then\n    canceled"),
        ),
        orders(
            "",
            lambda: programs.the_end_of_a_run_meets_a_cancel(READ_COMMITTED, True, "suspend", 0),
        ),
    ),
    Mutant(
        "a cancel without a lock",
        (
            (
                "select x.* into t from leasetask.task x where x.id = task for no key update;\n"
                "  if not found then\n"
                "    raise exception 'leasetask: no task %', task using errcode = 'LT002';\n"
                "  elsif t.finished_at",
                "select x.* into t from leasetask.task x where x.id = task;\n"
                "  if not found then\n"
                "    raise exception 'leasetask: no task %', task using errcode = 'LT002';\n"
                "  elsif t.finished_at",
            ),
        ),
        stops("", lambda: programs.a_cancel_is_stopped("suspend")),
    ),
    Mutant(
        "a claim that waits for locked rows",
        (
            (
                "      order by t.next_run_at limit l.quota\n"
                "      for no key update of t skip locked",
                "      order by t.next_run_at limit l.quota\n      for no key update of t",
            ),
        ),
        orders("blocked", lambda: programs.three_claims(True)),
    ),
    Mutant(
        "an enqueue that looks once",
        (
            (
                "    exit when cardinality(answered) = cardinality(ids);",
                "    exit;",
            ),
        ),
        stops("", lambda: programs.an_enqueue_is_stopped("a prune that forgets keys", "finished")),
    ),
    Mutant(
        "a hash that knows more than equality",
        (
            (
                "select int8send(jsonb_hash_extended(input, 0))"
                " || int8send(jsonb_hash_extended(input, 1))",
                "select sha256(convert_to(input::text, 'UTF8'))",
            ),
        ),
        story("", checks.a_key_names_one_input),
    ),
    Mutant(
        "a retry that keeps the failure",
        (
            (
                "since := (t.last_error ->> 'n')::int;",
                "since := null;",
            ),
        ),
        story("", checks.a_retry_drops_the_failure_and_what_came_after),
    ),
    Mutant(
        "a deadline that grows",
        (
            (
                "deadline = now_ + make_interval(secs => x.deadline_after),",
                "deadline = now_ + (x.deadline - x.created_at),",
            ),
        ),
        story("", checks.a_retry_drops_the_failure_and_what_came_after),
    ),
)
