"""Forks workers from a process that has imported everything, so that a test can afford many.

Reads lines `KILL_AFTER ARGUMENTS…` and answers each with the child's pid; the child is a
`leasetask worker` of its own, and nothing of this process runs in it.
"""

from __future__ import annotations

import os
import signal
import sys

import business

from leasetask import worker
from leasetask.cli import main

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
assert worker.Worker
for line in sys.stdin:
    kill_after, *arguments = line.split()
    child = os.fork()
    if child == 0:
        os.environ["KILL_AFTER"] = kill_after
        sys.stdin.close()
        sys.argv = ["leasetask", "worker", f"{business.__file__}:app", *arguments]
        main()
    print(child, flush=True)
