-- leasetask: roles with no more rights than their part needs. `leasetask migrate --roles` runs this, as
-- a role that may create roles; it may be run again at any time, and again after each upgrade.
--
--   leasetask_observer   reads: show, list, stats, doctor
--   leasetask_producer   enqueues, signals and cancels, and reads what became of it
--   leasetask_worker     claims, checkpoints, ends, sweeps and prunes; and produces, for ctx.enqueue
--   leasetask_operator   retries, resolves, prunes, pauses and sweeps; and produces
--
-- None may write a table: every change goes through a function, which runs as the schema's owner. They
-- are NOLOGIN: grant them to the roles that your services log in as, as in
--   grant leasetask_producer to shop;

do $$
declare
  name text;
begin
  foreach name in array array['leasetask_observer', 'leasetask_producer', 'leasetask_worker',
                              'leasetask_operator'] loop
    begin
      execute format('create role %I nologin', name);
    exception when duplicate_object or unique_violation then
      null;  -- roles belong to the whole server: another database's migration made it
    end;
  end loop;
end $$;

grant usage on schema leasetask
  to leasetask_observer, leasetask_producer, leasetask_worker, leasetask_operator;

grant select on all tables in schema leasetask to leasetask_observer;
grant execute on function
  leasetask.clock, leasetask.recorded_steps, leasetask.stats, leasetask.list,
  leasetask.undelivered_topics
  to leasetask_observer;

grant leasetask_observer to leasetask_producer;
grant execute on function
  leasetask.enqueue, leasetask.try_enqueue, leasetask.enqueue_many, leasetask.signal,
  leasetask.signal_now, leasetask.clear_signal, leasetask.deliver, leasetask.cancel
  to leasetask_producer;

grant leasetask_producer to leasetask_worker;
grant execute on function
  leasetask.declare_kinds, leasetask.set_idle, leasetask.claim, leasetask.heartbeat,
  leasetask.checkpoint, leasetask.note, leasetask.open_fenced, leasetask.finish,
  leasetask.suspend, leasetask.release, leasetask.abandon, leasetask.fail, leasetask.lanes,
  leasetask.sweep, leasetask.prune
  to leasetask_worker;

grant leasetask_producer to leasetask_operator;
grant execute on function
  leasetask.sweep, leasetask.retry, leasetask.resolve, leasetask.prune, leasetask.pause
  to leasetask_operator;
