// What the Node adapters share. process.hrtime is CLOCK_MONOTONIC, as Python's time.monotonic is.

import { openSync, writeSync } from "node:fs";
import { setTimeout } from "node:timers/promises";

const file = openSync(process.env.BENCH_MARKS, "a");
const seen = new Set();

export const now = () => Number(process.hrtime.bigint()) / 1e9;

export function note(word, number) {
  writeSync(file, `${word} ${number} ${now().toFixed(6)}\n`);
}

export function first(word = "first") {
  if (!seen.has(word)) {
    seen.add(word);
    note(word, 0);
  }
}

// Notes the ends of the stretches of a long task that are compared.
export function step(number, total) {
  if ([0, 100, total - 100, total].includes(number)) {
    note(`step-${number > 100 ? number - total : number}`, number);
  }
}

export async function timed(call) {
  const began = now();
  await call();
  return now() - began;
}

export async function paced(n, seconds, call) {
  const began = [];
  for (let i = 0; i < n; i++) {
    await setTimeout(seconds * 1000);
    began.push(now());
    await call(i);
  }
  return began;
}

export async function run(commands) {
  const [name, ...args] = process.argv.slice(2);
  const answer = await commands[name](...args);
  if (name !== "work") {
    console.log(JSON.stringify(answer ?? null));
    process.exit(0);
  }
}
