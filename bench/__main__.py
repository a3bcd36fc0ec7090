"""`python -m bench quick`, `python -m bench full`, `python -m bench page [RESULTS]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench import common, environments, floor, page, results, server
from bench.engine import Engine
from bench.engines import LEASETASK, PEERS
from bench.lab import Case, Lab
from bench.own import cases as own_cases

REPETITIONS = {"quick": 3, "full": 5}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for mode in REPETITIONS:
        command = commands.add_parser(mode)
        command.add_argument("--repetitions", type=int, default=REPETITIONS[mode])
        command.add_argument("--only", action="append", help="a workload; may be given again")
        command.add_argument("--engine", action="append", help="an engine; may be given again")
        command.add_argument(
            "--most-rows", type=int, default=10**7, help="in the backlog; 10,000,000 take 15 GB"
        )
        command.add_argument("--no-page", action="store_true", help="keep bench/README.md as it is")
    commands.add_parser("page").add_argument("results", type=Path, nargs="?")
    asked = parser.parse_args()
    if asked.command == "page":
        page.write(asked.results or page.newest())
        return
    measure(asked)


def measure(asked: argparse.Namespace) -> None:
    """Run what was asked for, and keep the results."""
    quick = asked.command == "quick"
    names = asked.engine or ([] if quick else [peer.name for peer in PEERS])
    peers = [peer for peer in PEERS if peer.name in names]
    with server.running() as running:
        lab = Lab(running, quick=quick, most_rows=asked.most_rows)
        kept, skipped, cases = {}, {}, []
        for engine in (LEASETASK, *peers):
            try:
                cases += engine_cases(lab, engine)
                kept[engine.name] = results.describe(engine, environments.versions(engine))
            except environments.Unavailable as error:
                skipped[engine.name] = str(error)
                print(f"skipped: {error}", file=sys.stderr)
        cases = [*floor.cases(lab), *cases, *own_cases(lab)]
        chosen = [case for case in cases if not asked.only or case.workload in asked.only]
        outcomes = results.run(chosen, asked.repetitions)
        file = results.save(results.as_json(outcomes, running, asked.command, kept, skipped))
    print(file)
    if not asked.no_page:
        page.write(file)


def engine_cases(lab: Lab, engine: Engine) -> list[Case]:
    return list(common.cases(lab, engine, environments.interpreter(engine)))


main()
