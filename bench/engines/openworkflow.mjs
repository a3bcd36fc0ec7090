// openworkflow on its PostgreSQL backend.

import * as marks from "./marks.mjs";
import { load } from "./modules.mjs";

const { OpenWorkflow } = await load("openworkflow");
const { BackendPostgres } = await load("openworkflow/postgres");

// Its driver takes a socket's folder from PGHOST.
const backend = await BackendPostgres.connect("postgres:///");
const ow = new OpenWorkflow({ backend });

const workflows = {
  noop: ow.defineWorkflow({ name: "noop" }, async ({ input }) => {
    marks.first();
    return input.i;
  }),
  steps: ow.defineWorkflow({ name: "steps" }, async ({ step }) => {
    marks.first();
    let total = 0;
    for (let i = 0; i < 10; i++) total += await step.run({ name: `step-${i}` }, async () => i);
    return total;
  }),
  long: ow.defineWorkflow({ name: "long" }, async ({ input, step }) => {
    marks.first();
    for (let i = 0; i < input.i; i++) {
      marks.step(i, input.i);
      await step.run({ name: `step-${i}` }, async () => i);
    }
    marks.step(input.i, input.i);
  }),
  pick: ow.defineWorkflow({ name: "pick" }, async ({ input }) => marks.note("pick", input.i)),
  wait: ow.defineWorkflow({ name: "wait" }, async ({ input, step }) => {
    await step.waitForSignal({ name: "signal", signal: `topic-${input.i}` });
    marks.note("woken", input.i);
  }),
};

const inputs = (kind, n) => (kind === "long" ? [n] : Array.from({ length: n }, (_, i) => i));

async function enqueue(kind, n) {
  const values = inputs(kind, Number(n));
  return marks.timed(async () => {
    for (const i of values) await workflows[kind].run({ i });
  });
}

const paced = (kind, n, seconds) =>
  marks.paced(Number(n), Number(seconds), (i) => workflows[kind].run({ i }));

const signal = (n, seconds) =>
  marks.paced(Number(n), Number(seconds), (i) => ow.sendSignal({ signal: `topic-${i}`, data: i }));

const work = () => ow.newWorker({ concurrency: 100 }).start();

await marks.run({ setup: () => null, enqueue, single: enqueue, paced, signal, work });
