-- leasetask's outbox, for a business that lives in another database than its tasks: a transaction
-- there writes a row here, and `leasetask outbox dispatch` makes exactly one task of it.
--
--   insert into outbox_event (kind, idempotency_key, payload) values ('publish', 'order-1', '{"id": 1}');
--
-- status: pending ──▶ dispatched (task_id names the task)
--                └──▶ refused   (error says why; mend the row and set it back to pending)
-- Delivered at least once; the engine's idempotency key makes it once. A row is locked while it is
-- dispatched, so any number of dispatchers may run.

create table if not exists outbox_event (
  id               bigserial primary key,
  kind             text not null,
  idempotency_key  text not null,
  payload          jsonb not null default 'null',
  status           text not null default 'pending'
    constraint outbox_status_is_known check (status in ('pending', 'dispatched', 'refused')),
  attempts         int not null default 0,
  next_attempt_at  timestamptz not null default clock_timestamp(),
  task_id          uuid,
  error            text,
  created_at       timestamptz not null default clock_timestamp(),
  dispatched_at    timestamptz
);

-- dispatch: the oldest that are due.
create index if not exists outbox_pending on outbox_event (next_attempt_at, id) where status = 'pending';
-- prune.
create index if not exists outbox_dispatched on outbox_event (dispatched_at) where status = 'dispatched';
