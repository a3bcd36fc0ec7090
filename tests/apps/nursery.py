"""Forks workers from a process that has imported everything, so that a test can afford many.

Its argument is the module with their App. Reads lines `KILL_AFTER ARGUMENTS…` and answers each with
the child's pid; the child is a `leasetask worker` of its own, and nothing of this process runs in it.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys

from leasetask import worker
from leasetask.cli import main

module = importlib.import_module(sys.argv[1])
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
assert worker.Worker
for line in sys.stdin:
    kill_after, *arguments = line.split()
    child = os.fork()
    if child == 0:
        os.environ["KILL_AFTER"] = kill_after
        sys.stdin.close()
        sys.argv = ["leasetask", "worker", f"{module.__file__}:app", *arguments]
        main()
    print(child, flush=True)
