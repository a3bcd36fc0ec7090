-- leasetask: durable tasks in your own PostgreSQL (14 to 18).
--
-- This file is the whole protocol: tables, and the functions by which producers, workers and
-- operators move tasks. It applies with `leasetask migrate`, or with `psql -f schema.sql`, and may
-- be applied again at any time. Any language can take part by calling the functions.
--
-- STATES (task.status)
--
--   pending ──claim──▶ running ──finish──▶ succeeded
--      ▲                │ │ │ ├──fail──▶ pending (budget left: due after the backoff), else failed
--      │                │ │ │ └──suspend──▶ waiting ──claim──▶ running
--      └─sweep, release─┘ │ └──cancel, then suspend, release, fail or sweep──▶ canceled
--                         └──sweep, lease out and budget spent──▶ dead
--   A pending or waiting task without compensations is canceled at once.
--   One that registered compensations becomes due with `compensating` = the status it will end in.
--
-- CLOCK     Only leasetask.clock() is ever compared with a lease or a due time; each function reads
--           it once. A test moves time by replacing that function.
-- FENCE     Whatever a running task writes carries its lease token and is refused unless the token
--           is the row's, looked at under the row's lock.
-- ANSWERS   Functions that a worker calls take arrays, at most one item per task, and answer one
--           row per item: `done`, `already` (a checkpoint that is recorded), `locked` (somebody
--           else holds the row: ask again), `lost` (the token is not the row's any more).
-- LOCKS     Worker and sweep statements take rows `for no key update skip locked`, so they never
--           wait for a user's transaction and never deadlock. Delivery takes a topic's signals by
--           id, then its waiters by age, `nowait`. A producer's call may wait for one row.
-- PLANS     Functions that must use an index whatever the statistics say switch the alternatives off;
--           that makes a plan look dear, so JIT, which would compile it at each call, is off too.
-- HOT       No index names a column that a heartbeat or a checkpoint changes, and no hot statement
--           names `status = 'running'` (the planner would walk that index's dead entries).
-- RIGHTS    What clients call runs as the schema's owner, with a search_path of its own, so nobody needs
--           rights on the tables but to read; nothing is granted to PUBLIC. See roles.sql.
-- SQLSTATE  LT001 the key names a task with another input   LT002 no such task
--           LT003 the task's state does not allow it        LT004 an argument is wrong
--           LT005 the lease is lost

begin;

set local client_min_messages = warning;
select pg_advisory_xact_lock(hashtext('leasetask.migrate'));
-- Applied to a database in use it may have to wait for a table; whoever comes after would wait behind
-- it, and leases would run out. Rather fail: `leasetask migrate` tries again by itself.
set local lock_timeout = '2s';

create schema if not exists leasetask;


-- ═══ Tables ═══════════════════════════════════════════════════════════════════════════════════

-- The server's clock; replaced by the test harness in scratch databases, and nowhere else.
create or replace function leasetask.clock() returns timestamptz
language sql volatile parallel safe as 'select pg_catalog.clock_timestamp()';

create table if not exists leasetask.schema_version (
  version     int primary key,
  applied_at  timestamptz not null default clock_timestamp()
);

-- The constraints are worded to be short: the server reads the text of each again for every statement
-- that writes a row, which for a lone one cost as much as the write.
-- What is indexed is collated "C": a new version of the system's library, which may sort differently,
-- then breaks no index, least of all the one that keeps keys unique.
-- In the order in which columns change: an update logs all that lies between the first and the last
-- byte that differ, so what a heartbeat or checkpoint changes stands together at the end.
create table if not exists leasetask.task (
  -- what it is
  id                   uuid primary key,
  kind                 text collate "C" not null,
  handler_version      int not null,
  idempotency_key      text collate "C" not null,
  input                jsonb not null,
  created_at           timestamptz not null default leasetask.clock(),
  trace                text,                         -- W3C traceparent of its enqueue
  -- its policy
  priority             smallint not null default 0,  -- lower runs sooner
  max_attempts         int not null default 5,
  backoff_initial      real not null default 1,      -- seconds; the sweep computes the next run from these
  backoff_factor       real not null default 2,
  backoff_max          real not null default 60,     -- seconds
  backoff_jitter       real not null default 0.1,    -- share of the delay, drawn anew each time
  deadline             timestamptz,
  deadline_after       float8,                       -- seconds; a retry starts the deadline anew
  -- how it ended
  result               jsonb,
  finished_at          timestamptz,
  dead_letter_at       timestamptz,
  pruned_at            timestamptz,
  input_hash           bytea,                        -- of the input, once it is pruned
  -- cancel and compensation
  cancel_requested_at  timestamptz,
  cancel_reason        text,
  compensations        int not null default 0,       -- registered so far
  compensating         text,                         -- the status it ends in once they have run
  last_error           jsonb,
  -- what it waits for
  next_run_at          timestamptz not null default leasetask.clock(),
  wait_mode            text,                         -- sleep, signal (consumes one) or hurry (wait_for: consumes none)
  wait_name            text,                         -- the step that the wait will be recorded as
  wait_seq             int,                          -- the `n` of that record
  wait_topic           text collate "C",
  wait_until           timestamptz,
  wait_snapshot        pg_snapshot,                  -- hurry: signals that it sees were known before the check
  waiting_since        timestamptz,
  undelivered          boolean not null default false, -- nobody has looked for this waiter's signal yet
  -- who runs it
  status               text not null default 'pending',
  runs                 int not null default 0,       -- claims since enqueue
  claimed_at           timestamptz,
  lease_owner          text collate "C",
  lease_token          uuid,
  released_token       uuid,                         -- the last lease that its own worker ended
  abandoned            boolean not null default false, -- left in a thread at shutdown: the sweep does not charge it
  suspect              boolean not null default false, -- its next run is alone in its process
  -- how far it is
  swept                smallint not null default 0,  -- times in a row that its owner was lost with other tasks
  attempts             int not null default 0,       -- claims since the last progress
  lease_until          timestamptz,
  stored_steps         int not null default 0,       -- recorded steps that moved from `state` to task_step
  updated_at           timestamptz not null default leasetask.clock(),
  progress             jsonb,
  state                jsonb not null default '{}',  -- recorded steps: name → {"n": order, "ok": value} or "error", "timeout", "cancelled"
  open_steps           jsonb not null default '{}',  -- steps begun and not recorded: name → tries, last error, an effect's start

  constraint task_names_fit_an_index check (
    kind <> '' and idempotency_key <> '' and wait_topic <> ''
    and greatest(octet_length(kind), octet_length(idempotency_key), octet_length(wait_topic)) <= 1000),
  constraint task_status_is_known check (
    status = any ('{pending,running,waiting,succeeded,failed,canceled,dead}')),
  constraint task_budget_is_kept check (
    attempts between 0 and max_attempts - (status = any ('{pending,waiting}'))::int),
  constraint task_running_is_leased check (
    num_nulls(lease_token, lease_until, lease_owner) = case status when 'running' then 0 else 3 end),
  constraint task_end_is_dated check (
    (finished_at is null) = (status = any ('{pending,running,waiting}'))
    and (dead_letter_at is null) = (status <> all ('{failed,dead}'))),
  constraint task_wait_is_whole check (
    wait_mode is null
    or status = 'waiting' and wait_name is not null and wait_mode = any ('{sleep,signal,hurry}')
       and (wait_topic is null) = (wait_mode = 'sleep')
       and (wait_snapshot is null) = (wait_mode <> 'hurry')
       and (wait_seq is not null or wait_mode = 'hurry')),
  constraint task_compensates_towards_an_end check (
    compensating = any ('{failed,canceled,dead}'))
)
-- A row triples while its steps are recorded, and a batch's old versions can only be pruned after its
-- commit: with this much room on each page, 95 % of checkpoints stay HOT. Claims and
-- ends leave dead rows faster than the default vacuum threshold is made for.
with (fillfactor = 25, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
      autovacuum_analyze_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

-- enqueue: a key names one task of its kind. A task without one has its id for a key: nobody looks for
-- it here, and an entry for each of its versions would be a tenth of what it costs.
create unique index if not exists task_key_is_unique
  on leasetask.task (kind, idempotency_key) where idempotency_key <> id::text;
-- claim: one short range scan for each (kind, version, priority), never past what is not due.
create index if not exists task_ready
  on leasetask.task (kind, handler_version, suspect, priority, next_run_at)
  where status in ('pending', 'waiting');
-- sweep: the running set, and what one owner holds.
create index if not exists task_running
  on leasetask.task (lease_owner) where status = 'running';
-- sweep: deadlines of what is not running.
create index if not exists task_deadline
  on leasetask.task (deadline) where status in ('pending', 'waiting') and deadline is not null;
-- deliver: the waiters of a topic, longest first; and those nobody has looked at.
create index if not exists task_waiting_for_topic
  on leasetask.task (wait_topic, waiting_since) where wait_topic is not null;
create index if not exists task_undelivered
  on leasetask.task (wait_topic) where undelivered;
-- prune and stats: the finished ones by age.
create index if not exists task_finished
  on leasetask.task (finished_at) where finished_at is not null and pruned_at is null;
-- dead-letter: those that await a person.
create index if not exists task_dead_letter
  on leasetask.task (dead_letter_at) where dead_letter_at is not null;

-- Where recorded steps go when `state` grows: rewriting it whole would make long tasks quadratic.
create table if not exists leasetask.task_step (
  task_id  uuid not null references leasetask.task (id) on delete cascade,
  name     text collate "C" not null,
  record   jsonb not null,
  primary key (task_id, name)
);

create table if not exists leasetask.task_signal (
  id           bigserial primary key,
  topic        text collate "C" not null,
  payload      jsonb,
  created_at   timestamptz not null default leasetask.clock(),
  consumed_by  uuid,
  consumed_at  timestamptz,
  sticky       boolean not null default false,       -- a latch: seen by every waiter until cleared
  undelivered  boolean not null default true,        -- nobody has looked for its waiters yet
  xid          xid8 not null default pg_current_xact_id(),

  constraint signal_topic_fits_an_index check (octet_length(topic) between 1 and 1000),
  constraint signal_latch_is_not_consumed check (not sticky or consumed_by is null),
  constraint signal_consumption_is_dated check ((consumed_by is null) = (consumed_at is null))
)
with (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000);

-- prune: the consumed ones by age, and those that nobody consumes.
create index if not exists signal_consumed
  on leasetask.task_signal (consumed_at) where consumed_at is not null;
create index if not exists signal_by_age
  on leasetask.task_signal (created_at) where consumed_by is null;
-- deliver: what a topic still has to give; a latch; what nobody has looked at; wait_for's newer ones.
create index if not exists signal_unconsumed
  on leasetask.task_signal (topic, id) where consumed_by is null and not sticky;
create index if not exists signal_sticky
  on leasetask.task_signal (topic, id) where sticky;
create index if not exists signal_undelivered
  on leasetask.task_signal (topic, id) where undelivered;
create index if not exists signal_of_topic
  on leasetask.task_signal (topic, xid);

-- What workers have declared: gives SQL callers a kind's policy and newest version, and makes tasks
-- that nobody can run visible.
create table if not exists leasetask.kind (
  kind             text collate "C" not null,
  version          int not null,
  priority         smallint not null,
  max_attempts     int not null,
  backoff_initial  real not null,
  backoff_factor   real not null,
  backoff_max      real not null,
  backoff_jitter   real not null,
  deadline         float8,                           -- seconds from enqueue
  paused           boolean not null default false,
  last_seen        timestamptz not null,
  primary key (kind, version)
);

-- Processes whose leases ran out, with how many they held: one found alone later was not alone.
create table if not exists leasetask.lost_owner (
  owner       text collate "C" primary key,
  held        int not null,
  noticed_at  timestamptz not null
);

-- Workers that sleep until they are notified. While it is empty nobody pays for NOTIFY, which makes
-- commits wait for each other.
create unlogged table if not exists leasetask.idle_worker (
  owner  text collate "C" primary key,
  since  timestamptz not null
);


-- ═══ Helpers ══════════════════════════════════════════════════════════════════════════════════

-- A UUIDv7 (RFC 9562): ids that are near in time are near in the index.
create or replace function leasetask.new_id(at timestamptz) returns uuid
language sql volatile parallel safe as $$
  select encode(
    set_bit(set_bit(
      overlay(uuid_send(gen_random_uuid())
              placing substring(int8send((date_part('epoch', at) * 1000)::bigint) from 3) from 1 for 6),
      52, 1), 53, 1), 'hex')::uuid
$$;

-- The delay before try number `attempts` + 1; 0 after a first crash is the sweep's own rule.
create or replace function leasetask.backoff(
  attempts int, initial real, factor real, longest real, jitter real
) returns interval
language sql volatile parallel safe as $$
  select make_interval(secs =>
    least(longest, initial * power(factor::float8, least(greatest(attempts - 1, 0), 64)))
    * (1 + jitter * (2 * random() - 1)))
$$;

-- Wakes idle workers when this transaction commits.
create or replace function leasetask.wake() returns void
language plpgsql as $$
begin
  if exists (select from leasetask.idle_worker) then
    perform pg_catalog.pg_notify('leasetask', 'task');
  end if;
end $$;

-- What last_error holds when the engine, and not the handler, gives the reason.
create or replace function leasetask.error(type text, message text, attempt int, at timestamptz)
returns jsonb
language sql stable parallel safe as $$
  select jsonb_build_object('type', type, 'message', message, 'attempt', attempt, 'at', at)
$$;

-- Locks the rows of a worker's batch and judges each item by its token. `held`: it may write.
-- `cancel`: a cancel was asked for and has not led to compensations yet. Every function that a
-- worker calls starts here; its next statement has a newer snapshot and so sees what was locked.
-- Raises LT004 when two items name one task: an update from both would silently keep one.
create or replace function leasetask.take(
  ids uuid[], tokens uuid[], out answers text[], out held boolean[], out cancel boolean[]
)
language plpgsql
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
set jit = off set enable_seqscan = off
set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
  own   boolean;
  asked boolean;
begin
  if cardinality(ids) = 1 then  -- the same without the arrays, which cost a lone item half its time
    select coalesce(t.lease_token = tokens[1], false),
           t.cancel_requested_at is not null and t.compensating is null
    into own, asked
    from leasetask.task t where t.id = ids[1] for no key update skip locked;
    answers := array[
      case when own then 'done'
           when own is null and exists (select from leasetask.task t where t.id = ids[1]) then 'locked'
           else 'lost' end];
    held := array[coalesce(own, false)];
    cancel := array[coalesce(asked, false)];
    return;
  end if;
  if (select count(distinct i) from unnest(ids) i) < cardinality(ids) then
    raise exception 'leasetask: a batch holds at most one item per task'
      using errcode = 'LT004', hint = 'Merge the items of one task, or send them one after another.';
  end if;
  select array_agg(
           case when m.held then 'done'
                when m.id is not null then 'lost'
                when exists (select from leasetask.task x where x.id = i.id) then 'locked'
                else 'lost' end order by i.ord),
         array_agg(coalesce(m.held, false) order by i.ord),
         array_agg(coalesce(m.cancel, false) order by i.ord)
  into answers, held, cancel
  from unnest(ids, tokens) with ordinality as i (id, token, ord)
  left join lateral (
    select t.id, coalesce(t.lease_token = i.token, false) as held,
           t.cancel_requested_at is not null and t.compensating is null as cancel
    from leasetask.task t where t.id = i.id
    for no key update of t skip locked
  ) m on true;
end $$;


-- The one place that decides between ending a task and running its compensations first. Called for
-- rows that the caller has locked, by cancel, suspend, release, fail and sweep. `ending` is failed,
-- canceled or dead; `own`: by the lease's own worker, whose token is then remembered. A task that
-- fails while it compensates ends.
create or replace function leasetask.end_or_compensate(
  ids uuid[], ending text, errors jsonb[], own boolean, now_ timestamptz
) returns void
language plpgsql
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
set jit = off set enable_seqscan = off
set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off
as $$
begin
  update leasetask.task t
  set status = case when e.unwind then 'pending' else ending end,
      compensating = case when e.unwind then ending else t.compensating end,
      attempts = case when e.unwind then 0 else t.attempts end,
      next_run_at = case when e.unwind then now_ else t.next_run_at end,
      finished_at = case when e.unwind then null else now_ end,
      dead_letter_at = case when e.unwind or ending = 'canceled' then null else now_ end,
      last_error = coalesce(e.error, t.last_error),
      released_token = case when own then coalesce(t.lease_token, t.released_token)
                            else t.released_token end,
      lease_owner = null, lease_until = null, lease_token = null,
      abandoned = false, swept = 0, suspect = false,
      wait_mode = null, wait_name = null, wait_seq = null, wait_topic = null, wait_until = null,
      wait_snapshot = null, waiting_since = null, undelivered = false,
      updated_at = now_
  from (
    select i.id, i.error, x.compensations > 0 and x.compensating is null as unwind
    from unnest(ids, errors) as i (id, error) join leasetask.task x on x.id = i.id
  ) e
  where t.id = e.id;
end $$;


-- ═══ A task's life, in order ══════════════════════════════════════════════════════════════════

-- ── enqueue ───────────────────────────────────────────────────────────────────────────────────

-- Called by producers, in their own transaction; both commit or neither. One row per input, in the
-- order given: `new`, `existing` (same kind, key and input), or `conflict` (the key names a task
-- with another input, which is returned as `stored_input`; null once pruned). Never raises for a
-- conflict. `keys` may hold nulls: such a task has its id for a key. What is null in the policy comes
-- from the kind as its workers declared it; who gives `version` and `max_attempts`, as an App does, is
-- taken to know it all, and no deadline means none. Rows are taken in the order of their keys, so two
-- producers cannot deadlock. Raises LT004 for arrays of unequal length.
create or replace function leasetask.enqueue_many(
  kind text, inputs jsonb[], keys text[] default null, at timestamptz default null,
  delay interval default null, priority smallint default null, version int default null,
  max_attempts int default null, backoff_initial real default null, backoff_factor real default null,
  backoff_max real default null, backoff_jitter real default null, deadline float8 default null,
  trace text default null
) returns table (ord int, id uuid, outcome text, stored_input jsonb)
language plpgsql security definer
set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
as $$
#variable_conflict use_column
declare
  now_     timestamptz := leasetask.clock();
  due      timestamptz := coalesce(enqueue_many.at, now_ + enqueue_many.delay, now_);
  ords     int[] := array(select generate_subscripts(inputs, 1));
  ids      uuid[] := array(select leasetask.new_id(now_) from generate_subscripts(inputs, 1));
  answered int[];
  made     int;
  declared leasetask.kind;
begin
  if cardinality(keys) <> cardinality(inputs) then
    raise exception 'leasetask: % inputs and % keys', cardinality(inputs), cardinality(keys)
      using errcode = 'LT004';
  end if;
  if enqueue_many.version is null or enqueue_many.max_attempts is null then
    select k.* into declared from leasetask.kind k
    where k.kind = enqueue_many.kind and (enqueue_many.version is null or k.version = enqueue_many.version)
    order by k.version desc limit 1;
    deadline := coalesce(enqueue_many.deadline, declared.deadline);
  end if;

  loop
    insert into leasetask.task (
      id, kind, handler_version, idempotency_key, input, priority, max_attempts, backoff_initial,
      backoff_factor, backoff_max, backoff_jitter, next_run_at, deadline, deadline_after, created_at,
      updated_at, trace)
    select i.id, enqueue_many.kind, coalesce(enqueue_many.version, declared.version, 1),
           coalesce(i.key, i.id::text) as key, i.input,
           coalesce(enqueue_many.priority, declared.priority, 0::smallint),
           coalesce(enqueue_many.max_attempts, declared.max_attempts, 5),
           coalesce(enqueue_many.backoff_initial, declared.backoff_initial, 1),
           coalesce(enqueue_many.backoff_factor, declared.backoff_factor, 2),
           coalesce(enqueue_many.backoff_max, declared.backoff_max, 60),
           coalesce(enqueue_many.backoff_jitter, declared.backoff_jitter, 0.1),
           due, now_ + make_interval(secs => enqueue_many.deadline), enqueue_many.deadline, now_, now_,
           enqueue_many.trace
    from unnest(ords, ids, inputs, keys) as i (ord, id, input, key)
    order by key, i.ord
    on conflict (kind, idempotency_key) where idempotency_key <> id::text do nothing;
    get diagnostics made = row_count;
    if made = cardinality(ids) then
      return query select i.ord, i.id, 'new', null::jsonb from unnest(ords, ids) as i (ord, id);
      exit;
    end if;

    -- A new statement, for a new snapshot: only it sees what made the insert step aside. Prune may
    -- have taken that away by now, so whatever is unanswered goes round again.
    answered := '{}';
    for ord, id, outcome, stored_input in
      select i.ord, coalesce(t.id, i.id),
             case when t.id is null or t.id = i.id then 'new'
                  when t.pruned_at is null and t.input = i.input then 'existing'
                  when t.pruned_at is not null and t.input_hash = leasetask.hash_input(i.input) then 'existing'
                  else 'conflict' end,
             case when t.id <> i.id and t.pruned_at is null and t.input <> i.input then t.input end
      from unnest(ords, ids, inputs, keys) as i (ord, id, input, key)
      left join lateral (
        select x.id, x.pruned_at, x.input, x.input_hash from leasetask.task x
        where x.kind = enqueue_many.kind and x.idempotency_key = i.key and x.idempotency_key <> x.id::text
        limit 1
      ) t on true
      where t.id is not null or i.key is null
    loop
      answered := answered || ord;
      return next;
    end loop;
    exit when cardinality(answered) = cardinality(ids);
    select array_agg(i.ord), array_agg(i.id), array_agg(i.input), array_agg(i.key)
    into ords, ids, inputs, keys
    from unnest(ords, ids, inputs, keys) as i (ord, id, input, key)
    where i.ord <> all (answered);
  end loop;
  perform leasetask.wake();
end $$;

-- What is kept of an input once it is pruned: 128 bits that agree with jsonb's own equality.
create or replace function leasetask.hash_input(input jsonb) returns bytea
language sql immutable parallel safe as $$
  select int8send(jsonb_hash_extended(input, 0)) || int8send(jsonb_hash_extended(input, 1))
$$;

-- One task; a row of outcome instead of an error, so a conflict does not abort the transaction. The
-- same insert without arrays, which cost a lone task a third of its time.
create or replace function leasetask.try_enqueue(
  kind text, input jsonb, key text default null, at timestamptz default null,
  delay interval default null, priority smallint default null, version int default null,
  max_attempts int default null, backoff_initial real default null, backoff_factor real default null,
  backoff_max real default null, backoff_jitter real default null, deadline float8 default null,
  trace text default null
) returns table (id uuid, outcome text, stored_input jsonb)
language plpgsql security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
  now_     timestamptz := leasetask.clock();
  declared leasetask.kind;
begin
  if version is null or max_attempts is null then
    select k.* into declared from leasetask.kind k
    where k.kind = try_enqueue.kind and (try_enqueue.version is null or k.version = try_enqueue.version)
    order by k.version desc limit 1;
    deadline := coalesce(try_enqueue.deadline, declared.deadline);
  end if;
  id := leasetask.new_id(now_);
  insert into leasetask.task (
    id, kind, handler_version, idempotency_key, input, priority, max_attempts, backoff_initial,
    backoff_factor, backoff_max, backoff_jitter, next_run_at, deadline, deadline_after, created_at,
    updated_at, trace)
  values (
    try_enqueue.id, try_enqueue.kind, coalesce(try_enqueue.version, declared.version, 1),
    coalesce(key, try_enqueue.id::text), try_enqueue.input,
    coalesce(try_enqueue.priority, declared.priority, 0::smallint),
    coalesce(try_enqueue.max_attempts, declared.max_attempts, 5),
    coalesce(try_enqueue.backoff_initial, declared.backoff_initial, 1),
    coalesce(try_enqueue.backoff_factor, declared.backoff_factor, 2),
    coalesce(try_enqueue.backoff_max, declared.backoff_max, 60),
    coalesce(try_enqueue.backoff_jitter, declared.backoff_jitter, 0.1),
    coalesce(at, now_ + delay, now_), now_ + make_interval(secs => try_enqueue.deadline),
    try_enqueue.deadline, now_, now_, try_enqueue.trace)
  on conflict (kind, idempotency_key) where idempotency_key <> id::text do nothing;
  if found then
    outcome := 'new';
    perform leasetask.wake();
    return next;
    return;
  end if;
  return query
  select e.id, e.outcome, e.stored_input
  from leasetask.enqueue_many(
    kind, array[input], array[key], at, delay, priority, version, max_attempts, backoff_initial,
    backoff_factor, backoff_max, backoff_jitter, try_enqueue.deadline, trace) e;
end $$;

-- For SQL by hand: select leasetask.enqueue('publish', '{"id": 1}', 'order-1'). Answers the id of
-- the new or existing task. Raises LT001 when the key names a task with another input.
create or replace function leasetask.enqueue(
  kind text, input jsonb, key text default null, at timestamptz default null,
  delay interval default null, priority smallint default null, version int default null
) returns uuid
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
  made record;
begin
  select e.id, e.outcome into made
  from leasetask.try_enqueue(kind, input, key, at, delay, priority, version) e;
  if made.outcome = 'conflict' then
    raise exception 'leasetask: key % of kind % names task %, which has another input', key, kind, made.id
      using errcode = 'LT001', hint = 'Use another key, or the input that this key was first used with.';
  end if;
  if not exists (select from leasetask.kind k where k.kind = enqueue.kind) then
    raise warning 'leasetask: no worker has declared kind % yet', kind;
  end if;
  return made.id;
end $$;


-- ── claim ─────────────────────────────────────────────────────────────────────────────────────

-- Workers say what they can run: at their start, and every minute, so that a kind nobody declares
-- any more can be told from one that is alive.
create or replace function leasetask.declare_kinds(
  kinds text[], versions int[], priorities smallint[], max_attempts int[], backoff_initial real[],
  backoff_factor real[], backoff_max real[], backoff_jitter real[], deadlines float8[]
) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
  insert into leasetask.kind as k (
    kind, version, priority, max_attempts, backoff_initial, backoff_factor, backoff_max,
    backoff_jitter, deadline, last_seen)
  select d.*, leasetask.clock()
  from unnest(kinds, versions, priorities, declare_kinds.max_attempts, declare_kinds.backoff_initial,
              declare_kinds.backoff_factor, declare_kinds.backoff_max, declare_kinds.backoff_jitter,
              deadlines)
       as d (kind, version, priority, max_attempts, i, f, m, j, deadline)
  order by d.kind, d.version
  on conflict (kind, version) do update
  set priority = excluded.priority, max_attempts = excluded.max_attempts,
      backoff_initial = excluded.backoff_initial, backoff_factor = excluded.backoff_factor,
      backoff_max = excluded.backoff_max, backoff_jitter = excluded.backoff_jitter,
      deadline = excluded.deadline, last_seen = excluded.last_seen;
end $$;

-- The (kind, version, priority) triples that have tasks to claim, due or not: a walk over the
-- distinct values in task_ready, whatever number of rows each has. Paused kinds are left out.
create or replace function leasetask.lanes(kinds text[], versions int[], suspects boolean)
returns table (kind text, version int, priority smallint)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set jit = off set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
as $$
#variable_conflict use_column
declare
  pair record;
begin
  for pair in
    select u.kind, u.version, f.priority
    from unnest(kinds, versions) as u (kind, version)
    cross join lateral (
      select t.priority from leasetask.task t
      where t.kind = u.kind and t.handler_version = u.version and t.suspect = suspects
        and t.status in ('pending', 'waiting')
      order by t.priority limit 1
    ) f
    where not exists (select from leasetask.kind k
                      where k.kind = u.kind and k.version = u.version and k.paused)
  loop
    kind := pair.kind; version := pair.version; priority := pair.priority;
    loop
      return next;
      exit when priority = 32767;
      select t.priority into priority from leasetask.task t
      where t.kind = pair.kind and t.handler_version = pair.version and t.suspect = suspects
        and t.priority >= lanes.priority + 1 and t.status in ('pending', 'waiting')
      order by t.priority limit 1;
      exit when not found;
    end loop;
  end loop;
end $$;

-- Called by a worker with n free slots: at most n due tasks of the given (kind, version) pairs, by
-- priority and then by due time, each `running` with a fresh token and one attempt more. A waiter
-- taken because its time has come has the timeout recorded in the same statement.
--
-- With `sinces`, the arrays name lanes (kind, version, priority) and where in each to begin: under a
-- snapshot that somebody holds open the dead entries at the head of task_ready cannot be cleaned
-- away, and a walk over them would grow with every task done. Without, it begins at the head of
-- every lane, and when fewer than n are due a last row, with a null id, tells when the next one is.
create or replace function leasetask.claim(
  owner text, kinds text[], versions int[], n int, lease interval, suspects boolean default false,
  priorities smallint[] default null, sinces timestamptz[] default null
) returns table (
  id uuid, kind text, handler_version int, idempotency_key text, input jsonb, state jsonb,
  open_steps jsonb, stored_steps int, attempts int, max_attempts int, runs int, lease_token uuid,
  priority smallint, next_run_at timestamptz, created_at timestamptz, deadline timestamptz,
  claimed_at timestamptz,
  cancel_requested boolean, compensating text, last_error jsonb, trace text)
language plpgsql security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
set jit = off set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
as $$
#variable_conflict use_column
declare
  now_     timestamptz := leasetask.clock();
  whole    boolean := sinces is null;
  quotas   int[];
  chosen   uuid[];
  lane     int;
  next_due timestamptz;
begin
  if n < 1 then
    return;
  end if;
  if whole then
    select array_agg(l.kind), array_agg(l.version), array_agg(l.priority),
           array_agg('-infinity'::timestamptz)
    into kinds, versions, priorities, sinces
    from leasetask.lanes(kinds, versions, suspects) l;
    if kinds is null then
      return;
    end if;
  end if;

  if cardinality(kinds) = 1 then
    quotas := array[n];
  else
    -- Looks without locks how many each lane would give; locking n in every lane would hide tasks
    -- from other workers that this one then leaves.
    quotas := array(
      select coalesce(q.quota, 0)::int
      from generate_subscripts(kinds, 1) as l (ord)
      left join (
        select m.ord, count(*) as quota
        from (
          select l.ord
          from unnest(kinds, versions, priorities, sinces) with ordinality
               as l (kind, version, priority, since, ord)
          cross join lateral (
            select t.next_run_at from leasetask.task t
            where t.kind = l.kind and t.handler_version = l.version and t.suspect = suspects
              and t.priority = l.priority and t.status in ('pending', 'waiting')
              and t.next_run_at >= l.since and t.next_run_at <= now_
              and (t.deadline is null or t.deadline > now_ or t.compensating is not null)
            order by t.next_run_at limit n
          ) c
          order by l.priority, c.next_run_at limit n
        ) m
        group by m.ord
      ) q on q.ord = l.ord
      order by l.ord);
  end if;

  chosen := array(
    select c.id
    from unnest(kinds, versions, priorities, sinces, quotas) as l (kind, version, priority, since, quota)
    cross join lateral (
      select t.id from leasetask.task t
      where t.kind = l.kind and t.handler_version = l.version and t.suspect = suspects
        and t.priority = l.priority and t.status in ('pending', 'waiting')
        and t.next_run_at >= l.since and t.next_run_at <= now_
        and (t.deadline is null or t.deadline > now_ or t.compensating is not null)
      order by t.next_run_at limit l.quota
      for no key update of t skip locked
    ) c);

  -- Rows that somebody holds were looked at and not taken: other lanes may make up for them.
  for lane in
    select l.ord::int from unnest(priorities) with ordinality as l (priority, ord)
    where cardinality(kinds) > 1 and cardinality(chosen) < (select sum(q) from unnest(quotas) q)
    order by l.priority
  loop
    chosen := chosen || array(
      select t.id from leasetask.task t
      where t.kind = kinds[lane] and t.handler_version = versions[lane] and t.suspect = suspects
        and t.priority = priorities[lane] and t.status in ('pending', 'waiting')
        and t.next_run_at >= sinces[lane] and t.next_run_at <= now_ and t.id <> all (chosen)
        and (t.deadline is null or t.deadline > now_ or t.compensating is not null)
      order by t.next_run_at limit n - cardinality(chosen)
      for no key update of t skip locked);
  end loop;

  if cardinality(chosen) > 0 then
    return query
    update leasetask.task t
    set status = 'running',
        attempts = t.attempts + 1,
        runs = t.runs + 1,
        claimed_at = now_,
        lease_owner = owner,
        lease_until = now_ + lease,
        lease_token = gen_random_uuid(),
        state = case when t.wait_mode in ('sleep', 'signal')
                     then t.state || jsonb_build_object(t.wait_name,
                            jsonb_build_object('n', t.wait_seq, 'timeout', true))
                     else t.state end,
        wait_mode = null, wait_name = null, wait_seq = null, wait_topic = null, wait_until = null,
        wait_snapshot = null, waiting_since = null, undelivered = false,
        updated_at = now_
    where t.id = any (chosen)
    returning t.id, t.kind, t.handler_version, t.idempotency_key, t.input, t.state, t.open_steps,
      t.stored_steps, t.attempts, t.max_attempts, t.runs, t.lease_token, t.priority, t.next_run_at,
      t.created_at, t.deadline, now_, t.cancel_requested_at is not null, t.compensating, t.last_error, t.trace;
  end if;

  if whole and cardinality(chosen) < n then
    select min(c.next_run_at) into next_due
    from unnest(kinds, versions, priorities) as l (kind, version, priority)
    cross join lateral (
      select t.next_run_at from leasetask.task t
      where t.kind = l.kind and t.handler_version = l.version and t.suspect = suspects
        and t.priority = l.priority and t.status in ('pending', 'waiting') and t.next_run_at > now_
      order by t.next_run_at limit 1
    ) c;
    if next_due < 'infinity' then
      id := null; next_run_at := next_due; claimed_at := now_;
      return next;
    end if;
  end if;
end $$;

-- A worker that has nothing to do says so, and is notified from then on; it claims once more after
-- saying it. Repeated every twenty seconds; the sweep forgets who has not for a minute.
create or replace function leasetask.set_idle(worker text, idle boolean) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  if idle then
    insert into leasetask.idle_worker as w (owner, since) values (worker, leasetask.clock())
    on conflict (owner) do update set since = excluded.since;
  else
    delete from leasetask.idle_worker w where w.owner = worker;
  end if;
end $$;


-- ── heartbeat ─────────────────────────────────────────────────────────────────────────────────

-- Extends leases, for all of a worker's tasks in one statement, and carries their progress (null:
-- unchanged). `lost`: this worker must stop. `cancel_requested`: no ordinary step may start.
create or replace function leasetask.heartbeat(
  ids uuid[], tokens uuid[], lease interval, progress jsonb[] default null
) returns table (ord int, answer text, cancel_requested boolean)
language plpgsql security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
set jit = off set enable_seqscan = off
set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
  now_ timestamptz := leasetask.clock();
  took record := leasetask.take(ids, tokens);
begin
  update leasetask.task t
  set lease_until = case when t.abandoned then t.lease_until else now_ + lease end,
      progress = coalesce(i.progress, t.progress),
      updated_at = now_
  from unnest(ids, heartbeat.progress, took.held) as i (id, progress, held)
  where t.id = i.id and i.held;

  return query
  select a.ord::int, a.answer, a.cancel
  from unnest(took.answers, took.cancel) with ordinality as a (answer, cancel, ord);
end $$;


-- ── checkpoint ────────────────────────────────────────────────────────────────────────────────

-- Records steps: each patch maps step names to records ({"n": order, "ok": value}, or "error",
-- "timeout", "cancelled" in place of "ok"). Never changes a step that is recorded: `already` says
-- that the patch holds one, that nothing was written, and what is recorded under its names (the
-- answer to a first try may have been lost). Sets the attempts to 1 and renews the lease.
-- `compensations` counts those that a patch registers. `state` stays below 2 kB: past it, its
-- records move to task_step.
create or replace function leasetask.checkpoint(
  ids uuid[], tokens uuid[], patches jsonb[], lease interval, compensations int[] default null
) returns table (ord int, answer text, cancel_requested boolean, recorded jsonb)
language plpgsql security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
set jit = off set enable_seqscan = off
set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
  now_     timestamptz := leasetask.clock();
  took     record := leasetask.take(ids, tokens);
  names    text[];
  large    boolean[];
  written  uuid[];
  outgrown uuid[];
begin
  if took.held = array[true] then
    -- The same for a lone task whose state stays small: half the time of the general statement.
    names := array(select jsonb_object_keys(patches[1]));
    update leasetask.task t
    set state = t.state || patches[1],
        open_steps = t.open_steps - names,
        compensations = t.compensations + coalesce(checkpoint.compensations[1], 0),
        attempts = 1 - t.abandoned::int, swept = 0, suspect = false,
        lease_until = case when t.abandoned then t.lease_until else now_ + lease end,
        updated_at = now_
    where t.id = ids[1] and pg_column_size(t.state || patches[1]) <= 2000
      and not t.state ?| names
      and (t.stored_steps = 0 or not exists (
        select from leasetask.task_step s where s.task_id = t.id and s.name = any (names)));
    if found then
      ord := 1; answer := 'done'; cancel_requested := took.cancel[1];
      return next;
      return;
    end if;
  end if;

  large := array(select pg_column_size(p.patch) > 2000 from unnest(patches) as p (patch));
  with w as (
    update leasetask.task t
    set state = case when i.large then t.state else t.state || i.patch end,
        stored_steps = case when i.large
                            then t.stored_steps + (select count(*) from jsonb_object_keys(i.patch))::int
                            else t.stored_steps end,
        open_steps = case when t.open_steps = '{}' then t.open_steps
                          else t.open_steps - array(select jsonb_object_keys(i.patch)) end,
        compensations = t.compensations + coalesce(i.registered, 0),
        attempts = 1 - t.abandoned::int, swept = 0, suspect = false,
        lease_until = case when t.abandoned then t.lease_until else now_ + lease end,
        updated_at = now_
    from unnest(ids, patches, checkpoint.compensations, took.held, large)
         as i (id, patch, registered, held, large)
    where t.id = i.id and i.held
      and not t.state ?| array(select jsonb_object_keys(i.patch))
      and (t.stored_steps = 0 or not exists (
        select from leasetask.task_step s
        where s.task_id = t.id and s.name in (select jsonb_object_keys(i.patch))))
    returning t.id, pg_column_size(t.state) > 2000 as outgrown
  )
  select array_agg(w.id), array_agg(w.id) filter (where w.outgrown) into written, outgrown from w;

  if true = any (large) then
    insert into leasetask.task_step (task_id, name, record)
    select i.id, r.key, r.value
    from unnest(ids, patches, large) as i (id, patch, large) cross join lateral jsonb_each(i.patch) r
    where i.large and i.id = any (written);
  end if;
  if outgrown is not null then
    insert into leasetask.task_step (task_id, name, record)
    select t.id, r.key, r.value from leasetask.task t cross join lateral jsonb_each(t.state) r
    where t.id = any (outgrown);
    update leasetask.task t
    set stored_steps = t.stored_steps + (select count(*) from jsonb_object_keys(t.state))::int, state = '{}'
    where t.id = any (outgrown);
  end if;

  return query
  select a.ord::int,
         case when a.held and a.id <> all (coalesce(written, '{}')) then 'already' else a.answer end,
         a.cancel,
         case when a.held and a.id <> all (coalesce(written, '{}'))
              then leasetask.recorded_steps(a.id, array(select jsonb_object_keys(a.patch))) end
  from unnest(ids, patches, took.answers, took.held, took.cancel) with ordinality
       as a (id, patch, answer, held, cancel, ord);
end $$;

-- The records of these steps, or of all when `names` is null, wherever they are kept.
create or replace function leasetask.recorded_steps(task uuid, names text[] default null)
returns jsonb
language sql stable set search_path = pg_catalog, pg_temp as $$
  select coalesce(jsonb_object_agg(r.name, r.record), '{}')
  from (
    select s.name, s.record from leasetask.task_step s
    where s.task_id = task and (names is null or s.name = any (names))
    union all
    select e.key, e.value from leasetask.task t cross join lateral jsonb_each(t.state) e
    where t.id = task and (names is null or e.key = any (names))
  ) r
$$;

-- The first statement of a worker's business transaction, whose last is checkpoint or finish. The
-- session may idle for one lease: a frozen worker must not hold business rows longer. `lock`, for an
-- isolation above READ COMMITTED: takes the task's row at once, since there a heartbeat in between
-- would make the fence fail; that lock is then the lease, as heartbeat and sweep pass over it.
-- Raises lock_not_available, and LT005 when the token is not the row's.
create or replace function leasetask.open_fenced(task uuid, token uuid, lease interval, lock boolean)
returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  perform set_config('idle_in_transaction_session_timeout',
                     ceil(extract(epoch from lease) * 1000)::bigint::text, true);
  if lock then
    perform from leasetask.task t where t.id = task and t.lease_token = token for no key update nowait;
    if not found then
      raise exception 'leasetask: the lease of task % is lost', task using errcode = 'LT005';
    end if;
  end if;
end $$;

-- Notes what is known of steps that are not recorded yet: an effect's start, before its `do` runs.
-- Not a checkpoint: the attempts stay. `already`: the note stands as it is.
create or replace function leasetask.note(
  ids uuid[], tokens uuid[], patches jsonb[], lease interval, compensations int[] default null
) returns table (ord int, answer text, cancel_requested boolean)
language plpgsql security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
set jit = off set enable_seqscan = off
set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
  now_    timestamptz := leasetask.clock();
  took    record := leasetask.take(ids, tokens);
  written uuid[];
begin
  with w as (
    update leasetask.task t
    set open_steps = t.open_steps || i.patch,
        compensations = t.compensations + coalesce(i.registered, 0),
        lease_until = case when t.abandoned then t.lease_until else now_ + lease end,
        updated_at = now_
    from unnest(ids, patches, note.compensations, took.held) as i (id, patch, registered, held)
    where t.id = i.id and i.held and not t.open_steps @> i.patch
    returning t.id
  )
  select array_agg(w.id) into written from w;
  return query
  select a.ord::int,
         case when a.held and a.id <> all (coalesce(written, '{}')) then 'already' else a.answer end,
         a.cancel
  from unnest(ids, took.answers, took.held, took.cancel) with ordinality
       as a (id, answer, held, cancel, ord);
end $$;


-- ── the ways in which a worker ends a run ─────────────────────────────────────────────────────
-- finish, suspend, release and fail hand the lease back and leave its token in released_token: a
-- worker that repeats the call, because the answer was lost, hears `done`. `status` is the task's
-- status afterwards: with a cancel asked for, all but finish follow the rule for waiting tasks.

-- The handler returned: `succeeded`; or its compensations have run, and it ends as was decided.
-- `fenced`: the last statement of a business transaction. There a repeated end answers `already`
-- instead of `done`: what the first try wrote is committed, so this one must be rolled back.
create or replace function leasetask.finish(
  ids uuid[], tokens uuid[], results jsonb[], fenced boolean default false
)
returns table (ord int, answer text, status text)
language plpgsql security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
set jit = off set enable_seqscan = off
set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
  now_ timestamptz := leasetask.clock();
  took record := leasetask.take(ids, tokens);
begin
  update leasetask.task t
  set status = coalesce(t.compensating, 'succeeded'),
      result = i.result,
      finished_at = now_,
      dead_letter_at = case when t.compensating in ('failed', 'dead') then now_ end,
      released_token = t.lease_token,
      lease_owner = null, lease_until = null, lease_token = null,
      abandoned = false,
      updated_at = now_
  from unnest(ids, results, took.held) as i (id, result, held)
  where t.id = i.id and i.held;
  return query
  select * from leasetask.answers(ids, tokens, took.answers, case when fenced then 'already' else 'done' end);
end $$;

-- The handler waits: for a time (`sleep`), for a signal of its own (`signal`), or for any hint that
-- its check may now pass (`hurry`). `seconds` or `untils` bound the wait; with both null it lasts
-- until the deadline or for ever. Sets the attempts to 0. The worker then delivers for the topics:
-- a signal that came before must not be slept over.
create or replace function leasetask.suspend(
  ids uuid[], tokens uuid[], modes text[], names text[], seqs int[], topics text[],
  seconds float8[], untils timestamptz[], snapshots pg_snapshot[], notes jsonb[] default null
) returns table (ord int, answer text, status text)
language plpgsql security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
set jit = off set enable_seqscan = off
set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
  now_ timestamptz := leasetask.clock();
  took record := leasetask.take(ids, tokens);
begin
  update leasetask.task t
  set status = 'waiting',
      attempts = 0, swept = 0, suspect = false,
      wait_mode = i.mode, wait_name = i.name, wait_seq = i.seq, wait_topic = i.topic,
      wait_until = i.until, wait_snapshot = i.snapshot, waiting_since = now_,
      undelivered = i.topic is not null,
      next_run_at = least(i.until, t.deadline, 'infinity'),
      open_steps = (t.open_steps - i.name) || coalesce(i.note, '{}'),
      released_token = t.lease_token,
      lease_owner = null, lease_until = null, lease_token = null,
      abandoned = false,
      updated_at = now_
  from (
    select u.id, u.mode, u.name, u.seq, u.topic, u.snapshot, u.note, u.held and not u.cancel as held,
           coalesce(u.until, now_ + make_interval(secs => u.seconds)) as until
    from unnest(ids, modes, names, seqs, topics, seconds, untils, snapshots, notes, took.held, took.cancel)
         as u (id, mode, name, seq, topic, seconds, until, snapshot, note, held, cancel)
  ) i
  where t.id = i.id and i.held;
  perform leasetask.cancel_taken(ids, took.held, took.cancel, now_);
  return query select * from leasetask.answers(ids, tokens, took.answers);
end $$;

-- Gives tasks back to be run again after `delays` seconds (null: at once): unrun or unwound at a
-- shutdown, or for a failed step's own next try, of which `notes` and `errors` tell. Takes the
-- claim's attempt back.
create or replace function leasetask.release(
  ids uuid[], tokens uuid[], delays float8[] default null, notes jsonb[] default null,
  errors jsonb[] default null
) returns table (ord int, answer text, status text)
language plpgsql security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
set jit = off set enable_seqscan = off
set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
  now_ timestamptz := leasetask.clock();
  took record := leasetask.take(ids, tokens);
begin
  update leasetask.task t
  set status = 'pending',
      attempts = greatest(t.attempts - case when t.abandoned then 0 else 1 end, 0),
      next_run_at = case when i.delay > 0 then now_ + make_interval(secs => i.delay)
                         else least(t.next_run_at, now_) end,  -- its old place in the queue
      open_steps = t.open_steps || coalesce(i.note, '{}'),
      last_error = case when t.compensating is null then coalesce(i.error, t.last_error) else t.last_error end,
      released_token = t.lease_token,
      lease_owner = null, lease_until = null, lease_token = null,
      abandoned = false,
      updated_at = now_
  from unnest(ids, delays, release.notes, release.errors, took.held, took.cancel)
       as i (id, delay, note, error, held, cancel)
  where t.id = i.id and i.held and not i.cancel;
  perform leasetask.cancel_taken(ids, took.held, took.cancel, now_);
  perform leasetask.wake();
  return query select * from leasetask.answers(ids, tokens, took.answers);
end $$;

-- At shutdown, for a task still inside a thread that cannot be stopped: the lease now ends `seconds`
-- from now, a moment after the process's certain end, and the sweep will neither charge nor suspect
-- the task. The token stays valid until then.
create or replace function leasetask.abandon(ids uuid[], tokens uuid[], seconds float8)
returns table (ord int, answer text)
language plpgsql security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
set jit = off set enable_seqscan = off
set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
  now_ timestamptz := leasetask.clock();
  took record := leasetask.take(ids, tokens);
begin
  update leasetask.task t
  set lease_until = now_ + make_interval(secs => seconds),
      attempts = greatest(t.attempts - 1, 0),
      abandoned = true,
      updated_at = now_
  from unnest(ids, took.held) as i (id, held)
  where t.id = i.id and i.held and not t.abandoned;
  return query
  select a.ord::int, a.answer from unnest(took.answers) with ordinality as a (answer, ord);
end $$;

-- The handler raised, or cannot be run. With `retryable` and budget left the task is due again after
-- `delays` seconds, or (null) after its backoff; else it ends `failed`, compensations first, unless
-- `outright`: a replay that went wrong cannot be trusted to compensate.
create or replace function leasetask.fail(
  ids uuid[], tokens uuid[], errors jsonb[], retryable boolean[], outright boolean[] default null,
  delays float8[] default null
) returns table (ord int, answer text, status text)
language plpgsql security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
set jit = off set enable_seqscan = off
set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
  now_   timestamptz := leasetask.clock();
  took   record := leasetask.take(ids, tokens);
  retry  boolean[];
  ending record;
begin
  retry := array(
    select coalesce(i.retryable and not coalesce(i.outright, false)
                    and t.attempts + t.abandoned::int < t.max_attempts, false)
    from unnest(ids, retryable, outright) with ordinality as i (id, retryable, outright, ord)
    left join leasetask.task t on t.id = i.id order by i.ord);

  update leasetask.task t
  set status = 'pending',
      attempts = t.attempts + t.abandoned::int,  -- abandon took one back, for an end that never came
      next_run_at = now_ + coalesce(
        make_interval(secs => i.delay),
        leasetask.backoff(t.attempts + t.abandoned::int, t.backoff_initial, t.backoff_factor, t.backoff_max, t.backoff_jitter)),
      last_error = case when t.compensating is null then i.error else t.last_error end,
      released_token = t.lease_token,
      lease_owner = null, lease_until = null, lease_token = null,
      abandoned = false,
      updated_at = now_
  from unnest(ids, errors, delays, took.held, took.cancel, retry)
       as i (id, error, delay, held, cancel, retry)
  where t.id = i.id and i.held and i.retry and not i.cancel;

  update leasetask.task t set compensations = 0
  from unnest(ids, outright, took.held) as i (id, outright, held)
  where t.id = i.id and i.held and i.outright and t.compensating is null;

  for ending in
    select case when i.retry then 'canceled' else 'failed' end as status,
           array_agg(i.id) as ids, array_agg(i.error) as errors
    from unnest(ids, errors, took.held, took.cancel, retry) as i (id, error, held, cancel, retry)
    where i.held and (not i.retry or i.cancel)
    group by 1
  loop
    perform leasetask.end_or_compensate(ending.ids, ending.status, ending.errors, true, now_);
  end loop;
  perform leasetask.wake();
  return query select * from leasetask.answers(ids, tokens, took.answers);
end $$;

-- Shared by suspend and release: what was taken and found with a cancel request under the lock.
create or replace function leasetask.cancel_taken(
  ids uuid[], held boolean[], cancel boolean[], now_ timestamptz
) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  canceled uuid[];
begin
  if true = any (cancel) then
    canceled := array(
      select i.id from unnest(ids, held, cancel) as i (id, held, cancel) where i.held and i.cancel);
    perform leasetask.end_or_compensate(canceled, 'canceled', null, true, now_);
    perform leasetask.wake();
  end if;
end $$;

-- Shared by the calls that end a run: one row per item.
create or replace function leasetask.answers(
  ids uuid[], tokens uuid[], answers text[], repeated text default 'done'
)
returns table (ord int, answer text, status text)
language plpgsql stable
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
set jit = off set enable_seqscan = off
set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
begin
  return query
  select a.ord::int,
         case when a.answer = 'lost' and t.released_token = a.token then repeated else a.answer end,
         t.status
  from unnest(ids, tokens, answers) with ordinality as a (id, token, answer, ord)
  left join leasetask.task t on t.id = a.id
  order by a.ord;
end $$;


-- ═══ Signals ══════════════════════════════════════════════════════════════════════════════════
-- No wake-up is lost because both sides commit first and look afterwards: a signal commits, then
-- somebody delivers its topic; a suspension commits, then its worker delivers its topic. Whichever
-- commits later sees the other. Both are born `undelivered`; the delivery that looked at them clears
-- the mark, so whoever dies in between leaves it for the next worker.

-- Called by anyone, in their own transaction; answers the signal's id. Wakes nobody by itself: it
-- is delivered after the commit, by a worker. `sticky`: a latch, seen by everyone who waits on the
-- topic, now or later, until clear_signal.
create or replace function leasetask.signal(
  topic text, payload jsonb default null, sticky boolean default false
) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  made bigint;
begin
  insert into leasetask.task_signal as s (topic, payload, sticky)
  values (signal.topic, signal.payload, signal.sticky) returning s.id into made;
  if exists (select from leasetask.idle_worker) then
    perform pg_notify('leasetask', 'signal');
  end if;
  return made;
end $$;

-- The same for a caller whose transaction is this call alone, in READ COMMITTED, and who delivers the
-- topic afterwards. Who waits already is woken by this very commit and not by a second one; `woken`
-- counts them. Clears no mark: a waiter that commits at the same moment is for that delivery to find.
create or replace function leasetask.signal_now(
  topic text, payload jsonb default null, sticky boolean default false, out id bigint, out woken int
)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
  insert into leasetask.task_signal as s (topic, payload, sticky)
  values (signal_now.topic, signal_now.payload, signal_now.sticky) returning s.id into id;
  begin
    select p.woken into woken from leasetask.pair_topic(topic, 100) p;
  exception when lock_not_available or serialization_failure then
    woken := 0;
  end;
  if woken > 0 then
    perform leasetask.wake();
  end if;
end $$;

-- Ends a topic's latch; answers whether there was one.
create or replace function leasetask.clear_signal(topic text) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
  delete from leasetask.task_signal s where s.topic = clear_signal.topic and s.sticky;
  return found;
end $$;

-- Pairs the signals of topics with their waiters. Called outside any other transaction, in READ
-- COMMITTED, by whoever has signalled or suspended and by workers for what is left undelivered.
-- One row per topic: how many waiters were woken, and whether to ask again (a row was locked, and
-- nothing of the topic was touched; or a round was full).
create or replace function leasetask.deliver(topics text[])
returns table (topic text, woken int, again boolean)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  total int := 0;
begin
  for topic in select distinct u.topic from unnest(topics) as u (topic) order by 1 loop
    begin
      select d.woken, d.again into woken, again from leasetask.deliver_topic(topic) d;
    exception when lock_not_available or serialization_failure then
      woken := 0; again := true;
    end;
    total := total + woken;
    return next;
  end loop;
  if total > 0 then
    perform leasetask.wake();
  end if;
end $$;

-- One round for one topic: at most a hundred of each. Raises lock_not_available rather than wait for
-- a row, or pass it over: a waiter skipped would sleep on beside its signal. The order of the looks is
-- what makes it safe to clear a mark: what is marked is looked at first, waiters before signals, and
-- the waiters to pair last, so of a signal and a waiter whichever committed later is either seen
-- together with the other here, or keeps its own mark. Each look states its conditions on the table it
-- locks, so a row that changed meanwhile is judged as it now is. Marks stay while a round is full.
create or replace function leasetask.deliver_topic(topic text, out woken int, out again boolean)
language plpgsql
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
set jit = off set enable_seqscan = off
set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
  size    constant int := 100;
  marked  uuid[];
  fresh   bigint[];
begin
  marked := array(
    select t.id from leasetask.task t
    where t.wait_topic = deliver_topic.topic and t.undelivered
    limit size for no key update nowait);
  fresh := array(
    select s.id from leasetask.task_signal s
    where s.topic = deliver_topic.topic and s.undelivered
    order by s.id limit size for no key update nowait);
  select p.woken, p.full_ into woken, again from leasetask.pair_topic(topic, size) p;
  again := again or cardinality(fresh) >= size or cardinality(marked) >= size;
  if woken = 0 or not again then
    update leasetask.task t set undelivered = false where t.id = any (marked) and t.undelivered;
    update leasetask.task_signal s set undelivered = false where s.id = any (fresh) and s.undelivered;
  end if;
end $$;

-- Shared by deliver_topic and signal_now: gives what a topic has to those who wait, at most `size` of
-- each sort; `full_` if there may be more.
create or replace function leasetask.pair_topic(topic text, size int, out woken int, out full_ boolean)
language plpgsql
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
set jit = off set enable_seqscan = off
set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
  now_    timestamptz := leasetask.clock();
  signals bigint[];
  latch   record;
  waiters uuid[];
  hurried uuid[];
begin
  signals := array(
    select s.id from leasetask.task_signal s
    where s.topic = pair_topic.topic and s.consumed_by is null and not s.sticky
    order by s.id limit size for no key update nowait);
  select s.id, s.payload into latch from leasetask.task_signal s
  where s.topic = pair_topic.topic and s.sticky order by s.id desc limit 1;
  waiters := array(
    select t.id from leasetask.task t
    where t.wait_topic = pair_topic.topic and t.wait_mode = 'signal'
    order by t.waiting_since, t.id
    limit case when latch.id is null then cardinality(signals) else size end
    for no key update nowait);
  hurried := array(
    select t.id from leasetask.task t
    where t.wait_topic = pair_topic.topic and t.wait_mode = 'hurry'
      and exists (select from leasetask.task_signal s
                  where s.topic = pair_topic.topic and s.xid >= pg_snapshot_xmin(t.wait_snapshot)
                    and not pg_visible_in_snapshot(s.xid, t.wait_snapshot))
    order by t.waiting_since, t.id limit size for no key update nowait);

  with pair as (
    select w.id as task, s.id as signal, coalesce(s.id, latch.id) as seen,
           case when s.id is null then latch.payload else s.payload end as payload
    from unnest(waiters) with ordinality as w (id, place)
    left join (
      select x.id, x.payload, u.place
      from unnest(signals) with ordinality as u (id, place)
      join leasetask.task_signal x on x.id = u.id
    ) s on s.place = w.place
  ),
  consumed as (
    update leasetask.task_signal s set consumed_by = p.task, consumed_at = now_
    from pair p where s.id = p.signal
  ),
  made_due as (
    update leasetask.task t
    set state = case when p.seen is null then t.state
                     else t.state || jsonb_build_object(t.wait_name, jsonb_build_object(
                            'n', t.wait_seq, 'ok', p.payload, 'signal', p.seen)) end,
        next_run_at = now_,
        wait_mode = null, wait_name = null, wait_seq = null, wait_topic = null, wait_until = null,
        wait_snapshot = null, waiting_since = null, undelivered = false,
        updated_at = now_
    from (select p.task, p.seen, p.payload from pair p
          union all select h, null, null from unnest(hurried) h) p
    where t.id = p.task
    returning t.id
  )
  select count(*)::int into woken from made_due;

  full_ := cardinality(waiters) >= size or cardinality(hurried) >= size;
end $$;

-- The topics that nobody has looked at since a signal or a waiter came to them. Workers ask once a
-- second and when notified, and deliver what it names.
create or replace function leasetask.undelivered_topics(n int default 100)
returns setof text
language sql stable
set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off set enable_sort = off
as $$
  select u.topic from (
    (select distinct s.topic from leasetask.task_signal s where s.undelivered limit n)
    union
    (select distinct t.wait_topic from leasetask.task t where t.undelivered limit n)
  ) u limit n
$$;


-- ═══ Cancel, sweep, retry, prune ══════════════════════════════════════════════════════════════

-- Called by anyone, in their own transaction. Answers `canceled` (it has ended), `compensating` (it
-- will, once its compensations have run), `requested` (it is running: its worker learns of it at its
-- next checkpoint or heartbeat), or `finished` (it had ended before: nothing was done).
-- Raises LT002 for an unknown id; waits while somebody else holds the row.
create or replace function leasetask.cancel(task uuid, reason text default null) returns text
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  now_ timestamptz := leasetask.clock();
  t    leasetask.task;
begin
  select x.* into t from leasetask.task x where x.id = task for no key update;
  if not found then
    raise exception 'leasetask: no task %', task using errcode = 'LT002';
  elsif t.finished_at is not null then
    return 'finished';
  elsif t.compensating is not null then
    return 'compensating';
  end if;
  update leasetask.task x
  set cancel_requested_at = coalesce(x.cancel_requested_at, now_),
      cancel_reason = coalesce(x.cancel_reason, reason), updated_at = now_
  where x.id = task;
  if t.status = 'running' then
    perform pg_notify('leasetask', 'cancel');
    return 'requested';
  end if;
  perform leasetask.end_or_compensate(array[task], 'canceled', null, false, now_);
  perform leasetask.wake();
  return case when t.compensations > 0 then 'compensating' else 'canceled' end;
end $$;

-- Finds leases that ran out and deadlines that passed; called by workers, and by `leasetask sweep`
-- from cron. One row per task: `recovered` (due again), `suspect` (due again, to be run alone),
-- `dead` (budget spent), `canceled`, `compensating`, `expired` (past its deadline: failed), or
-- `error` with the reason, which stops nothing else. Handles at most n: call it until fewer than n
-- others than `error` come.
--
-- A crash must not take bystanders with it: a lease is charged in full only if its owner held no
-- other. Else the task is given back: the first time since its last checkpoint as it is, then, or
-- when its budget would be spent, as a suspect, whose next run is alone in its process.
create or replace function leasetask.sweep(n int default 1000)
returns table (id uuid, kind text, outcome text, error text)
language plpgsql security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
set jit = off set enable_seqscan = off set enable_sort = off
as $$
#variable_conflict use_column
declare
  now_  timestamptz := leasetask.clock();
  lost  record;
  found_ record;
  held_ int;
  swept_ int := 0;
begin
  for lost in
    select t.lease_owner as owner, count(*)::int as held
    from leasetask.task t where t.status = 'running'
    group by t.lease_owner having min(t.lease_until) < now_
  loop
    -- Somebody's open transaction may be sweeping this owner: never wait for it.
    exit when swept_ >= n;
    continue when not pg_try_advisory_xact_lock(hashtextextended('leasetask.owner ' || lost.owner, 0));
    insert into leasetask.lost_owner as o (owner, held, noticed_at) values (lost.owner, lost.held, now_)
    on conflict (owner) do update set held = greatest(o.held, excluded.held)
    returning o.held into held_;

    for found_ in
      select t.id, t.kind from leasetask.task t
      where t.status = 'running' and t.lease_owner = lost.owner and t.lease_until < now_
    loop
      exit when swept_ >= n;
      id := found_.id; kind := found_.kind; error := null;
      begin
        outcome := leasetask.sweep_lease(id, held_, now_);
        continue when outcome is null;
        swept_ := swept_ + 1;
      exception when others then
        outcome := 'error'; error := sqlerrm;
      end;
      return next;
    end loop;
  end loop;

  for found_ in
    select t.id, t.kind from leasetask.task t
    where t.status in ('pending', 'waiting') and t.deadline <= now_ and t.compensating is null
    order by t.deadline
  loop
    exit when swept_ >= n;
    id := found_.id; kind := found_.kind; error := null;
    begin
      perform from leasetask.task t
      where t.id = found_.id and t.status in ('pending', 'waiting') and t.deadline <= now_
        and t.compensating is null
      for no key update skip locked;
      continue when not found;
      perform leasetask.end_or_compensate(array[id], 'failed', array[leasetask.error(
        'DeadlineExceeded', 'the task did not end before its deadline', null, now_)], false, now_);
      outcome := 'expired';
      swept_ := swept_ + 1;
    exception when others then
      outcome := 'error'; error := sqlerrm;
    end;
    return next;
  end loop;

  if swept_ > 0 then
    perform leasetask.wake();
  end if;
  delete from leasetask.lost_owner o where o.owner = any (array(
    select x.owner from leasetask.lost_owner x
    where x.noticed_at < now_ - interval '24 hours' for update skip locked));
  delete from leasetask.idle_worker w where w.owner = any (array(
    select x.owner from leasetask.idle_worker x
    where x.since < now_ - interval '1 minute' for update skip locked));
end $$;

-- One lease of `sweep`: looked at again under the row's lock; null when it is not out any more, or
-- when somebody holds the row. `held`: how many leases its owner had when it was lost.
create or replace function leasetask.sweep_lease(task uuid, held int, now_ timestamptz)
returns text
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  t       leasetask.task;
  company boolean := held > 1;
  reason  jsonb;
begin
  select x.* into t from leasetask.task x
  where x.id = task and x.lease_until < now_ for no key update skip locked;
  if not found then
    return null;
  end if;
  reason := leasetask.error('LeaseExpired', format(
    'worker %s died, or lost contact for a whole lease, while it ran this task%s', t.lease_owner,
    case when company then format(' and %s others', held - 1) else '' end), t.attempts, now_);

  if t.cancel_requested_at is not null and t.compensating is null then
    perform leasetask.end_or_compensate(array[task], 'canceled', null, false, now_);
    return case when t.compensations > 0 then 'compensating' else 'canceled' end;
  elsif not company and not t.abandoned and t.attempts >= t.max_attempts then
    perform leasetask.end_or_compensate(array[task], 'dead', array[reason], false, now_);
    return case when t.compensations > 0 and t.compensating is null then 'compensating' else 'dead' end;
  end if;

  company := company and not t.abandoned;
  update leasetask.task x
  set status = 'pending',
      suspect = x.suspect or (company and (x.swept > 0 or x.attempts >= x.max_attempts)),
      swept = case when company then least(x.swept + 1, 100) else x.swept end,
      attempts = least(x.attempts, x.max_attempts - 1),
      next_run_at = case when x.attempts <= 1 or x.abandoned
                         then least(x.next_run_at, now_)  -- its old place in the queue
                         else now_ + leasetask.backoff(x.attempts, x.backoff_initial, x.backoff_factor,
                                                       x.backoff_max, x.backoff_jitter) end,
      last_error = case when x.abandoned then x.last_error else reason end,
      lease_owner = null, lease_until = null, lease_token = null, abandoned = false,
      updated_at = now_
  where x.id = task
  returning x.* into t;
  return case when t.suspect then 'suspect' else 'recovered' end;
end $$;

-- The operator gives a `failed` or `dead` task another chance: the failure that ended it and all
-- that was recorded after it are dropped, the rest is kept, the budget is whole and the deadline
-- starts anew. An effect's start is kept: its `reconcile` must still be asked.
-- Raises LT002 for an unknown id, LT003 for a task that is in another state or has compensated.
create or replace function leasetask.retry(task uuid) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  now_    timestamptz := leasetask.clock();
  t       leasetask.task;
  since   int;
  records jsonb;
begin
  select x.* into t from leasetask.task x where x.id = task for no key update;
  if not found then
    raise exception 'leasetask: no task %', task using errcode = 'LT002';
  elsif t.compensating is not null then
    raise exception 'leasetask: task % has run compensations and cannot go on', task
      using errcode = 'LT003', hint = format(
        'Start it afresh: select leasetask.enqueue(%L, %L, %L)', t.kind, t.input, t.idempotency_key || '/again');
  elsif t.dead_letter_at is null then
    raise exception 'leasetask: task % is %; only a failed or dead task can be retried', task, t.status
      using errcode = 'LT003';
  elsif t.pruned_at is not null then
    raise exception 'leasetask: task % was pruned: its input is gone', task using errcode = 'LT003';
  end if;
  since := (t.last_error ->> 'n')::int;
  records := leasetask.recorded_steps(task);
  delete from leasetask.task_step s where s.task_id = task and (s.record ->> 'n')::int >= since;
  update leasetask.task x
  set status = 'pending', attempts = 0, swept = 0, suspect = false,
      next_run_at = now_, deadline = now_ + make_interval(secs => x.deadline_after),
      dead_letter_at = null, finished_at = null, cancel_requested_at = null, cancel_reason = null,
      state = (select coalesce(jsonb_object_agg(e.key, e.value), '{}') from jsonb_each(x.state) e
               where since is null or (e.value ->> 'n')::int < since),
      stored_steps = (select count(*) from leasetask.task_step s where s.task_id = task),
      compensations = (select count(*) from jsonb_each(records) e
                       where e.value ? 'compensate' and (since is null or (e.value ->> 'n')::int < since))
                    + (select count(*) from jsonb_each(x.open_steps) e where e.value ? 'compensate'),
      open_steps = (select coalesce(jsonb_object_agg(o.key, o.value - 'tries' - 'error'), '{}')
                    from (select e.key, e.value from jsonb_each(x.open_steps) e
                          union all
                          select e.key, e.value - 'n' - 'ok' - 'ms'
                          from jsonb_each(records) e where (e.value ->> 'n')::int >= since) o
                    where o.value -> 'started' <> 'null'),
      updated_at = now_
  where x.id = task;
  perform leasetask.wake();
end $$;

-- A person says what became of an effect that nobody could tell about, and the task goes on: `done`
-- is its result; null: do it again. Raises LT002, and LT003 unless the task failed over this effect.
create or replace function leasetask.resolve(task uuid, step text, done jsonb) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  t    leasetask.task;
  note jsonb;
begin
  select x.* into t from leasetask.task x where x.id = task for no key update;
  if not found then
    raise exception 'leasetask: no task %', task using errcode = 'LT002';
  end if;
  note := t.open_steps -> step;
  if t.status <> 'failed' or t.last_error ->> 'type' <> 'EffectUnknown' or t.last_error ->> 'step' <> step
     or note is null then
    raise exception 'leasetask: task % does not wait for a decision on effect %', task, step
      using errcode = 'LT003';
  end if;
  if done is null then
    note := note || jsonb_build_object('settled', note -> 'started');
  end if;
  update leasetask.task x
  set open_steps = case when done is null then x.open_steps || jsonb_build_object(step, note)
                        else x.open_steps - step end,
      state = case when done is null then x.state
                   else x.state || jsonb_build_object(step, (note - 'token' - 'settled' - 'tries' - 'error') || jsonb_build_object(
                          'ok', done, 'resolved', true, 'n', 1 + coalesce((
                            select max((r.value ->> 'n')::int)
                            from jsonb_each(leasetask.recorded_steps(task)) r), 0))) end
  where x.id = task;
  if t.compensating is null then
    perform leasetask.retry(task);
    return;
  end if;
  update leasetask.task x  -- on its way to its end: the compensations that are left run now
  set status = 'pending', attempts = 0, swept = 0, suspect = false, next_run_at = leasetask.clock(),
      dead_letter_at = null, finished_at = null, updated_at = leasetask.clock()
  where x.id = task;
  perform leasetask.wake();
end $$;

-- Empties finished tasks older than `age` of their input, state and result; key, id, the input's
-- hash, status and times stay, so a key keeps its meaning for ever. With `forget_keys` the rows go
-- altogether. Consumed signals and latches that a newer one replaced go after `age`, at the least a
-- day; signals that nobody consumed after `signal_age`. At most n of each a call, rows that somebody
-- holds left alone; answers how many rows it touched: call it until that is 0. Workers do, now and then.
create or replace function leasetask.prune(
  age interval default '720 hours', signal_age interval default '2160 hours',
  forget_keys boolean default false, n int default 1000
) returns int
language plpgsql security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_custom_plan set jit = off set enable_seqscan = off set enable_sort = off
set enable_bitmapscan = off
as $$
declare
  now_  timestamptz := leasetask.clock();
  -- A day has 24 hours here, whatever the session's time zone does in spring.
  ended timestamptz := now_ - make_interval(secs => extract(epoch from age)::float8);
  kept  timestamptz := least(ended, now_ - interval '24 hours');
  sent  timestamptz := now_ - make_interval(secs => extract(epoch from signal_age)::float8);
  ids   uuid[];
  total int;
  rows_ int;
begin
  ids := array(
    select t.id from leasetask.task t
    where t.finished_at < ended and t.finished_at is not null
      and (forget_keys or t.pruned_at is null)
    order by t.finished_at limit n for update skip locked);
  if forget_keys then
    delete from leasetask.task t where t.id = any (ids);
  else
    delete from leasetask.task_step s where s.task_id = any (ids);
    update leasetask.task t
    set input_hash = leasetask.hash_input(t.input), input = 'null', state = '{}', open_steps = '{}',
        stored_steps = 0, result = null, progress = null, pruned_at = now_, updated_at = now_
    where t.id = any (ids);
  end if;
  total := coalesce(cardinality(ids), 0);

  delete from leasetask.task_signal s where s.id = any (
    array(select x.id from leasetask.task_signal x
          where x.consumed_at < kept
          order by x.consumed_at limit n for update skip locked)
    || array(select x.id from leasetask.task_signal x
             where x.consumed_by is null and x.created_at < sent and not x.sticky
             order by x.created_at limit n for update skip locked)
    || array(select x.id from leasetask.task_signal x
             where x.consumed_by is null and x.created_at < kept and x.sticky and exists (
               select from leasetask.task_signal y where y.topic = x.topic and y.sticky and y.id > x.id)
             order by x.created_at limit n for update skip locked));
  get diagnostics rows_ = row_count;
  return total + rows_;
end $$;


-- ═══ Looking ══════════════════════════════════════════════════════════════════════════════════
-- For operators: read-only, and quick however many rows there are. Counts stop at `most`, and rates
-- look at no more than a tenth as many ends.

-- One row for each (kind, version) that has unfinished tasks or was declared. `declared_at` null, or
-- old: nobody can run it. Waiting times and run times are those of the last claims, in seconds.
create or replace function leasetask.stats(period interval default '5 minutes', most int default 100000)
returns table (
  kind text, version int, declared_at timestamptz, paused boolean, ready bigint, suspects bigint,
  later bigint, waiting bigint, running bigint, oldest_ready timestamptz, succeeded bigint,
  failed bigint, wait_p50 float8, wait_p95 float8, run_p50 float8, run_p95 float8)
language plpgsql stable
set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
as $$
#variable_conflict use_column
declare
  now_  timestamptz := leasetask.clock();
  ends  jsonb;                                       -- "kind version" → counts and times, looked up once
  ended jsonb;
begin
  select jsonb_object_agg(e.kind || ' ' || e.handler_version, to_jsonb(e)) into ends
  from (
    -- A canceled task has not run to its end, nor waited for its claim.
    select x.kind, x.handler_version,
           count(*) filter (where x.status = 'succeeded') as succeeded,
           count(*) filter (where x.status <> 'succeeded') as failed,
           percentile_cont(array[0.5, 0.95]) within group
             (order by extract(epoch from x.claimed_at - x.next_run_at)) as waits,
           percentile_cont(array[0.5, 0.95]) within group
             (order by extract(epoch from x.finished_at - x.claimed_at)) as runs
    from (select t.* from leasetask.task t
          where t.finished_at is not null and t.pruned_at is null and t.finished_at > now_ - period
          order by t.finished_at desc limit most / 10) x
    where x.status in ('succeeded', 'failed', 'dead')
    group by x.kind, x.handler_version
  ) e;
  for kind, version in
    with recursive pair as (
      (select t.kind, t.handler_version from leasetask.task t
       where t.status in ('pending', 'waiting') order by t.kind, t.handler_version limit 1)
      union all
      select n.kind, n.handler_version from pair p cross join lateral (
        select t.kind, t.handler_version from leasetask.task t
        where t.status in ('pending', 'waiting') and (t.kind, t.handler_version) > (p.kind, p.handler_version)
        order by t.kind, t.handler_version limit 1) n
    )
    select p.kind, p.handler_version from pair p
    union select k.kind, k.version from leasetask.kind k
    union select t.kind, t.handler_version from leasetask.task t where t.status = 'running'
    order by 1, 2
  loop
    declared_at := null; paused := null;
    select k.last_seen, k.paused into declared_at, paused from leasetask.kind k
    where k.kind = stats.kind and k.version = stats.version;
    -- Of what is due nothing is asked that task_ready does not hold, so that no row has to be read.
    select count(*), count(*) filter (where u.suspect), min(u.next_run_at)
    into ready, suspects, oldest_ready
    from (select t.suspect, t.next_run_at from leasetask.task t
          where t.kind = stats.kind and t.handler_version = stats.version
            and t.status in ('pending', 'waiting') and t.next_run_at <= now_ limit most) u;
    select count(*) filter (where u.status = 'pending'), count(*) filter (where u.status = 'waiting')
    into later, waiting
    from (select t.status from leasetask.task t
          where t.kind = stats.kind and t.handler_version = stats.version
            and t.status in ('pending', 'waiting') and t.next_run_at > now_ limit most) u;
    select count(*) into running from leasetask.task t
    where t.status = 'running' and t.kind = stats.kind and t.handler_version = stats.version;
    ended := ends -> (kind || ' ' || version);
    succeeded := coalesce((ended ->> 'succeeded')::bigint, 0);
    failed := coalesce((ended ->> 'failed')::bigint, 0);
    wait_p50 := (ended -> 'waits' ->> 0)::float8; wait_p95 := (ended -> 'waits' ->> 1)::float8;
    run_p50 := (ended -> 'runs' ->> 0)::float8; run_p95 := (ended -> 'runs' ->> 1)::float8;
    return next;
  end loop;
end $$;

-- A page of tasks, the newest first; a filter that is null is none. Each source is a short walk in one
-- index; without a key, a status or a topic it looks at the newest `most` tasks only.
create or replace function leasetask.list(
  kind text default null, version int default null, statuses text[] default null, key text default null,
  topic text default null, older_than interval default null, priority smallint default null,
  before uuid default null, n int default 50, most int default 100000
) returns setof leasetask.task
language plpgsql stable
set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
as $$
#variable_conflict use_column
declare
  source text := case
    when key is not null and kind is not null then $q$ x.kind = $1 and x.idempotency_key = $4
                                                       and x.idempotency_key <> x.id::text $q$
    when topic is not null then $q$ x.status = 'waiting' and x.wait_topic = $5 $q$
    when statuses <@ array['pending', 'waiting'] then $q$ x.status in ('pending', 'waiting') $q$
    when statuses <@ array['running'] then $q$ x.status = 'running' $q$
    when statuses <@ array['failed', 'dead'] then $q$ x.dead_letter_at is not null $q$
    else $q$ x.id in (select y.id from leasetask.task y where $8 is null or y.id < $8
                      order by y.id desc limit $10) $q$ end;
begin
  return query execute $q$
    select x.* from leasetask.task x
    where ($1 is null or x.kind = $1) and ($2 is null or x.handler_version = $2)
      and ($3 is null or x.status = any ($3)) and ($4 is null or x.idempotency_key = $4)
      and ($5 is null or x.wait_topic = $5) and ($6 is null or x.created_at < $11 - $6)
      and ($7 is null or x.priority = $7) and ($8 is null or x.id < $8) and $q$ || source || $q$
    order by x.id desc limit $9 $q$
  using list.kind, list.version, statuses, list.key, topic, older_than, list.priority, before, n, most,
        leasetask.clock();
end $$;

-- Stops (or, with false, resumes) the claims of a kind, of one version or of all; answers how many
-- versions there are.
create or replace function leasetask.pause(kind text, version int default null, paused boolean default true)
returns int
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  changed int;
begin
  update leasetask.kind k set paused = pause.paused
  where k.kind = pause.kind and (pause.version is null or k.version = pause.version);
  get diagnostics changed = row_count;
  if not pause.paused then
    perform leasetask.wake();
  end if;
  return changed;
end $$;

-- PostgreSQL lets everybody execute a new function; these are for those who were granted them.
revoke all on all functions in schema leasetask from public;


-- ═══ Version ══════════════════════════════════════════════════════════════════════════════════

insert into leasetask.schema_version (version) values (1) on conflict do nothing;

commit;
