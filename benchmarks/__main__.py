"""Run benchmarks: `python -m benchmarks speed` and so on; figures go to the terminal and, with --json, to a file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks import speed


def main() -> int:
    """Parse the arguments, run one benchmark, print its table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="benchmark", required=True)
    one = commands.add_parser("speed", help="overhead per task, time from trigger to revision, memory, resume")
    one.add_argument("--short", action="store_true", help="smaller sizes and fewer rounds, for a first look")
    one.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    report = speed.measure(short=arguments.short)
    print(report.table())
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
