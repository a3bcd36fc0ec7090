// pg-boss, in batches, woken by LISTEN/NOTIFY.

import * as marks from "./marks.mjs";
import { load } from "./modules.mjs";

const { PgBoss } = await load("pg-boss");
const BULK = 1000;

async function started(options = {}) {
  const { PGHOST: host, PGUSER: user, PGDATABASE: database } = process.env;
  const boss = new PgBoss({ host, user, database, useListenNotify: true, ...options });
  boss.on("error", console.error);
  await boss.start();
  return boss;
}

async function setup() {
  const boss = await started();
  for (const kind of ["noop", "pick"]) await boss.createQueue(kind, { notify: true });
}

async function enqueue(kind, n) {
  const boss = await started();
  const jobs = Array.from({ length: Number(n) }, (_, i) => ({ data: { i } }));
  return marks.timed(async () => {
    for (let i = 0; i < jobs.length; i += BULK) await boss.insert(kind, jobs.slice(i, i + BULK));
  });
}

async function single(kind, n) {
  const boss = await started();
  return marks.timed(async () => {
    for (let i = 0; i < Number(n); i++) await boss.send(kind, { i });
  });
}

async function paced(kind, n, seconds) {
  const boss = await started();
  return marks.paced(Number(n), Number(seconds), (i) => boss.send(kind, { i }));
}

async function work() {
  const boss = await started();
  const options = { batchSize: 500, burstWhenBatchFull: true, pollingIntervalSeconds: 0.5 };
  await boss.work("noop", options, async () => marks.first());
  await boss.work("pick", options, async (jobs) => jobs.forEach((job) => marks.note("pick", job.data.i)));
}

await marks.run({ setup, enqueue, single, paced, work });
