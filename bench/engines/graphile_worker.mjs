// graphile-worker, with the batching that its page on performance describes.

import * as marks from "./marks.mjs";
import { load } from "./modules.mjs";

const { makeWorkerUtils, run: runWorker, runMigrations } = (await load("graphile-worker")).default;
const { Pool } = (await load("pg")).default;

const pgPool = new Pool({ max: 10 });
const utils = () => makeWorkerUtils({ pgPool });
const BULK = 1000;

async function enqueue(kind, n) {
  const to = await utils();
  const jobs = Array.from({ length: Number(n) }, (_, i) => ({ identifier: kind, payload: { i } }));
  return marks.timed(async () => {
    for (let start = 0; start < jobs.length; start += BULK) {
      await to.addJobs(jobs.slice(start, start + BULK));
    }
  });
}

async function single(kind, n) {
  const to = await utils();
  return marks.timed(async () => {
    for (let i = 0; i < Number(n); i++) await to.addJob(kind, { i });
  });
}

async function paced(kind, n, seconds) {
  const to = await utils();
  return marks.paced(Number(n), Number(seconds), (i) => to.addJob(kind, { i }));
}

async function work() {
  await runWorker({
    pgPool,
    taskList: {
      noop: async () => marks.first(),
      pick: async ({ i }) => marks.note("pick", i),
    },
    preset: {
      worker: {
        concurrentJobs: 24,
        localQueue: { size: 500 },
        completeJobBatchDelay: 0,
        failJobBatchDelay: 0,
      },
    },
    logger: undefined,
  });
}

await marks.run({ setup: () => runMigrations({ pgPool }), enqueue, single, paced, work });
