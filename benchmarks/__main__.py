"""Run benchmarks. Tables go to the terminal, progress to standard error, figures with --json to a file.

speed      the overhead of the library, as ratios to floors measured in the same run
planbench  recovery after an unexpected event, on published instances, compared with baselines
workflows  real workflow executions with injected faults
tools      agent-shaped plans with unavailable tools
tools_that_fail
           real conversations at a shop's service desk, with tools that fail or give wrong answers
effects    a lost answer and a half-finished booking in other frameworks; `make effects` installs them
mapping    a list with failing elements, here and in other frameworks; `make effects` installs them
calls      the overhead of the engine per tool call, for each installed agent framework
planning   our own time in each phase of planning mode; with --llm also the model's
capacity   the capacity of one host and one PostgreSQL server, for the sizing page; on a quiet machine, in three minutes
lists      lists of 10,000 elements, each a task, compared with equal plans written out; in four minutes
fanout     plans of 10,000 and 50,000 tasks on Temporal; on a quiet machine
pages      the cost of ten open pages for a run, and their delay; in two minutes
all        everything; without the published data, only the benchmarks that do not need it
fetch      downloads the published data to benchmarks/data, and checks the checksums
readme     updates the tables and plots of the pages from benchmarks/results

The long form on the published data also writes benchmarks/results/, the source of the pages.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from benchmarks import (
    calls,
    capacity,
    fanout,
    fetch,
    lists,
    outages,
    pages,
    planbench,
    planning,
    readme,
    speed,
    workflows,
)
from benchmarks.effects import measure as effects
from benchmarks.mapping import measure as mapping
from benchmarks.tools_that_fail import measure as tools_that_fail
from benchmarks.tools_that_fail.shop import FILE as SHOP

Part = tuple[str, object]


def main() -> int:
    """Parse the arguments, run the benchmarks, print their tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "benchmark", nargs="?", default="all", choices=["all", *_BENCHMARKS, "fetch", "readme"]
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="where the data lies; by default ../shared/data, else benchmarks/data",
    )
    parser.add_argument(
        "--from",
        dest="host",
        default=fetch.HOST,
        metavar="URL",
        help="where to fetch from; by default %(default)s",
    )
    parser.add_argument(
        "--short", action="store_true", help="fewer instances and rounds, for a first look"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help="how often speed, calls, lists and pages are measured (by default 3, 10, 1 and 1 times in the short form, else 7, 50, 3 and 7)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        metavar="N",
        help="tools_that_fail: chooses the calls that fail, and how; the session is also measured with the next two",
    )
    parser.add_argument(
        "--llm", metavar="NAME", help="planning: a real model to measure as well, such as openai"
    )
    parser.add_argument(
        "--postgres",
        metavar="URL",
        help="capacity: the server to measure; by default one that is started for it",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    if arguments.benchmark == "readme":
        print("\n".join(str(path) for path in readme.write()))
        return 0
    if arguments.benchmark == "fetch":
        return _fetch(arguments.data or fetch.FETCHED, arguments.host)
    arguments.data = arguments.data or fetch.at_hand()
    names = list(_BENCHMARKS) if arguments.benchmark == "all" else [arguments.benchmark]
    figures = {}
    for name in names:
        part = _BENCHMARKS[name](arguments)
        if part is None and len(names) == 1:
            return 1
        if part is not None:
            print(f"\n## {name}\n\n{part[0]}")
            figures[name] = part[1]
            if not arguments.short and fetch.known(arguments.data):
                _say(f"written: {readme.save(name, part[1])}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def _fetch(folder: Path, host: str) -> int:
    try:
        paths = fetch.fetch(folder, host=host, report=_say)
    except (fetch.FetchError, OSError) as error:
        _say(f"error: {error}")
        return 1
    print("\n".join(map(str, paths)))
    return 0


def _speed(arguments: argparse.Namespace) -> Part:
    report = speed.measure(short=arguments.short, rounds=arguments.rounds, report=_say)
    return report.table(), report.to_json()


def _calls(arguments: argparse.Namespace) -> Part:
    report = calls.measure(short=arguments.short, rounds=arguments.rounds, report=_say)
    return report.table(), report.to_json()


def _planbench(arguments: argparse.Namespace) -> Part | None:
    if not _there(arguments.data, "planbench", *planbench.FILES):
        return None
    rows = planbench.measure(arguments.data, limit=60 if arguments.short else None, report=_say)
    return planbench.table(rows), planbench.to_json(rows)


def _workflows(arguments: argparse.Namespace) -> Part | None:
    if not _there(arguments.data, "workflows", workflows.FILE):
        return None
    rows = workflows.measure(arguments.data, limit=20 if arguments.short else None, report=_say)
    return workflows.table(rows), workflows.to_json(rows)


def _tools(arguments: argparse.Namespace) -> Part:
    rows = outages.measure(report=_say)
    return outages.table(rows), outages.to_json(rows)


def _tools_that_fail(arguments: argparse.Namespace) -> Part | None:
    if not (arguments.data / SHOP).exists():
        _say(
            f"tools_that_fail is left out: {SHOP} not found in {arguments.data}; benchmarks/README.md says how it is made"
        )
        return None
    report = tools_that_fail.measure(
        arguments.data, seed=arguments.seed, every=10 if arguments.short else 1, report=_say
    )
    return report.table(), report.to_json()


def _effects(arguments: argparse.Namespace) -> Part | None:
    if not arguments.short and not _installed("effects", list(effects.FRAMEWORKS)):
        return None
    report = effects.measure(short=arguments.short, report=_say)
    return report.table(), report.to_json()


def _mapping(arguments: argparse.Namespace) -> Part | None:
    frameworks = list(dict.fromkeys(framework for framework, _ in mapping.COLUMNS.values()))
    if arguments.short:
        report = mapping.measure(ours=True, rounds=1, report=_say)
    elif _installed("mapping", frameworks):
        report = mapping.measure(report=_say)
    else:
        return None
    return report.table(), report.to_json()


def _installed(name: str, frameworks: list[str]) -> bool:
    """Return whether frameworks are installed; report the missing ones."""
    absent: list[str] = []
    for framework in frameworks:
        absent += effects.missing(framework)
    if absent:
        _say(f"{name} is left out: {', '.join(absent)} not installed; `make effects` installs them")
    return not absent


def _planning(arguments: argparse.Namespace) -> Part:
    report = planning.measure(
        short=arguments.short, rounds=arguments.rounds, llm=arguments.llm, report=_say
    )
    return report.table(), report.to_json()


def _capacity(arguments: argparse.Namespace) -> Part:
    found = capacity.measure(short=arguments.short, postgres=arguments.postgres, report=_say)
    return found.table(), found.to_json()


def _lists(arguments: argparse.Namespace) -> Part:
    if arguments.short:
        report = lists.measure(sizes=(250, 500, 1_000), rounds=arguments.rounds or 1, report=_say)
    else:
        report = lists.measure(rounds=arguments.rounds or 3, report=_say)
    return report.table(), report.to_json()


def _fanout(arguments: argparse.Namespace) -> Part | None:
    if find_spec("temporalio") is None:
        _say('fanout is left out: it needs pip install "replanning[temporal,temporal-server]"')
        return None
    report = fanout.measure(short=arguments.short, report=_say)
    return report.table(), report.to_json()


def _pages(arguments: argparse.Namespace) -> Part | None:
    if find_spec("uvicorn") is None or find_spec("jinja2") is None:
        _say('pages is left out: it needs pip install "replanning[view]"')
        return None
    rounds = arguments.rounds or (1 if arguments.short else 7)
    report = pages.measure(rounds=rounds, tasks=500 if arguments.short else 2_000, report=_say)
    return report.table(), report.to_json()


def _there(folder: Path, name: str, *files: str) -> bool:
    missing = [file for file in files if not (folder / file).exists()]
    if not missing:
        return True
    if name == "planbench" and any(folder.glob("*.jsonl")):  # instances of somebody else's
        return True
    _say(
        f"{name} is left out: {', '.join(missing)} not found in {folder}; get them by `python -m benchmarks fetch`, or give their folder by --data"
    )
    return False


def _say(line: str) -> None:
    print(line, file=sys.stderr)


_BENCHMARKS: dict[str, Callable[[argparse.Namespace], Part | None]] = {
    "speed": _speed,
    "calls": _calls,
    "planbench": _planbench,
    "workflows": _workflows,
    "tools": _tools,
    "tools_that_fail": _tools_that_fail,
    "effects": _effects,
    "mapping": _mapping,
    "planning": _planning,
    "capacity": _capacity,
    "lists": _lists,
    "fanout": _fanout,
    "pages": _pages,
}

if __name__ == "__main__":
    sys.exit(main())
