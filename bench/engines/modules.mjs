// Finds an engine's packages in the environment whose Node runs the adapter, not beside this file.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(`${process.env.BENCH_MODULES}/`);

export const load = async (name) => import(pathToFileURL(require.resolve(name)));
