"""The engines that are compared; the adapters beside this file run in environments of their own."""

from __future__ import annotations

from bench.engine import Contract, Engine

QUEUE = frozenset({"drain", "enqueue", "pick-up"})
DURABLE = QUEUE | {"steps", "long task", "signal wake"}

LEASETASK = Engine(
    name="leasetask",
    adapter="leasetask_.py",
    left="select count(*) from (select from leasetask.task where status in ('pending', 'waiting') "
    "union all select from leasetask.task where status = 'running') t",
    able=DURABLE,
    settings="concurrency 100, lease 30 s, the rest as it comes",
    contract=Contract("yes, row by row", "yes", "yes", "lease, any live worker; 30 s by default"),
)

PEERS = (
    Engine(
        name="pgqueuer",
        adapter="pgqueuer_.py",
        packages=("pgqueuer", "asyncpg", "uvloop"),
        left="select count(*) from pgqueuer",
        able=QUEUE,
        settings="asyncpg, uvloop, batch_size 100",
        contract=Contract("no", "a log row per job", "no", "heartbeat, 30 s"),
        reference={"drain": 12_600},
    ),
    Engine(
        name="graphile-worker",
        adapter="graphile_worker.mjs",
        runtime="node",
        packages=("graphile-worker",),
        left="select count(*) from graphile_worker._private_jobs",
        able=QUEUE,
        settings="concurrentJobs 24, localQueue.size 500, completeJobBatchDelay 0",
        contract=Contract("no", "no: done jobs are deleted", "no", "4 h"),
        reference={"drain": 23_800},
    ),
    Engine(
        name="absurd",
        adapter="absurd.py",
        packages=("absurd-sdk", "absurdctl"),
        left="select count(*) from absurd.t_bench where state in ('pending', 'running', 'sleeping')",
        able=DURABLE,
        settings="AsyncAbsurd, concurrency 100, poll_interval 0.01 s",
        contract=Contract("in part", "yes", "yes", "claim timeout, 120 s"),
        reference={"drain": 775, "steps": 690, "long task": 840},
    ),
    Engine(
        name="dbos",
        adapter="dbos_.py",
        packages=("dbos",),
        left="select count(*) from dbos.workflow_status where status in ('ENQUEUED', 'PENDING')",
        able=DURABLE,
        settings="worker_concurrency 100, polling 0.01 s, pool of 20",
        contract=Contract(
            "yes", "yes", "yes", "its own restart; by others only with the paid part"
        ),
        reference={"drain": 760, "steps": 241, "long task": 264},
    ),
    Engine(
        name="openworkflow",
        adapter="openworkflow.mjs",
        runtime="node",
        packages=("openworkflow@0.10.1", "postgres"),
        left="select count(*) from openworkflow.workflow_runs where status in ('pending', 'running', 'sleeping')",
        able=DURABLE,
        settings="concurrency 100",
        contract=Contract("no", "yes", "yes", "24 s, fixed"),
        reference={"drain": 173, "steps": 1105, "long task": 577},
    ),
    Engine(
        name="pg-boss",
        adapter="pg_boss.mjs",
        runtime="node",
        packages=("pg-boss@12", "pg"),
        left="select count(*) from pgboss.job where state < 'completed'",
        able=QUEUE,
        settings="batchSize 500, burst while batches are full, LISTEN/NOTIFY",
        contract=Contract("no", "yes", "no", "15 min"),
        reference={"drain": 15_600},
    ),
    Engine(
        name="oban",
        adapter="oban_.py",
        runtime="python3.12",
        packages=("oban",),
        left="select count(*) from oban_jobs where state in ('available', 'executing', 'scheduled')",
        able=QUEUE,
        settings="queue limit 100",
        contract=Contract("no", "yes", "no", "295 s"),
        reference={"drain": 1_600},
    ),
    Engine(
        name="procrastinate",
        adapter="procrastinate_.py",
        packages=("procrastinate",),
        left="select count(*) from procrastinate_jobs where status in ('todo', 'doing')",
        able=QUEUE,
        settings="concurrency 100",
        contract=Contract("no", "yes", "no", "by the user's own periodic task"),
        reference={"drain": 480},
    ),
)
