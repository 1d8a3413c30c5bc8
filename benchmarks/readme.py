"""Writes the tables and plots of the pages from the committed results, so that they stay consistent."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks import fanout, outages, planbench, plots, workflows
from benchmarks.effects.measure import Report as Effects
from benchmarks.figures import Report, code_hash
from benchmarks.mapping.measure import Report as Mapping
from benchmarks.sizing import Capacity
from benchmarks.tools_that_fail.measure import Report as ToolsThatFail
from replanning.plan import JsonObject

RESULTS = Path(__file__).parent / "results"
MEASURED = "measured.json"
"""File with the hash of the measured code for each result."""

ROOT = Path(__file__).parent.parent
PAGES = (
    ROOT / "README.md",
    ROOT / "benchmarks" / "README.md",
    ROOT / "docs" / "comparison.md",
    ROOT / "docs" / "how-to" / "sizing.md",
    ROOT / "docs" / "integrations" / "temporal.md",
)
ORDER = {
    "gpt4": "GPT-4's replans alone",
    "gpt4, verified": "GPT-4's replans, verified by the engine",
    "gpt4, then repair": "GPT-4's replans, verified, with `repair` behind it",
    "repair": "`repair` alone, no model",
    "scratch": "planning from scratch (breadth first)",
    "retry": "retrying the step",
    "retry 3": "retrying the last three steps",
    "skip": "skipping what cannot be done",
    "none": "no replanning",
}


def save(name: str, figures: object, folder: Path = RESULTS) -> Path:
    """Keep the figures of one benchmark, a row a line."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    if isinstance(figures, list):
        text = "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in figures) + "\n]\n"
    else:
        text = json.dumps(figures, indent=1, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")
    stamps = _stamps(folder)
    stamps[name] = code_hash()
    stamped = json.dumps(dict(sorted(stamps.items())), indent=1) + "\n"
    (folder / MEASURED).write_text(stamped, encoding="utf-8")
    return path


def outdated(folder: Path = RESULTS) -> list[str]:
    """Return the names of the results that were measured with other code."""
    stamps = _stamps(folder)
    code = code_hash()
    old: list[str] = []
    for path in sorted(folder.glob("*.json")):
        if path.name != MEASURED and stamps.get(path.stem) != code:
            old.append(path.stem)
    return old


def _stamps(folder: Path) -> dict[str, str]:
    path = folder / MEASURED
    if not path.exists():
        return {}
    return TypeAdapter(dict[str, str]).validate_json(path.read_bytes())


def written(text: str, folder: Path = RESULTS) -> str:
    """A page with the tables between its markers `<!-- benchmarks:NAME -->` renewed.

    Raises:
        ValueError: a marker names no benchmark, or has no end.
    """
    for name in re.findall(r"<!-- benchmarks:([\w-]+) -->", text):
        if name not in {*_TABLES, "summary", "sizes"}:
            raise ValueError(f"benchmarks:{name} is none of {', '.join(_TABLES)}, summary, sizes")
        begin = f"<!-- benchmarks:{name} -->\n"
        end = f"<!-- /benchmarks:{name} -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"the marker benchmarks:{name} has no end: write {end} below it")
        if name == "summary":
            table = _summary(folder)
        elif name == "sizes":
            table = Capacity.from_json(_read(folder, "capacity")).sizes()
        else:
            table = _TABLES[name](_read(folder, name))
        text = f"{before}{begin}\n{table}\n\n{end}{after}"
    return text


def drawn(folder: Path = RESULTS) -> dict[str, str]:
    """The plots by their file names."""
    rows = _planbench_rows(_read(folder, "planbench"))
    by_name = {row.strategy: row for row in rows if row.file == rows[0].file}
    recovered = []
    for name, words in ORDER.items():
        row = by_name.get(name)
        if row is not None:
            recovered.append((words.replace("`", ""), row.percent, row.low, row.high))
    title = f"Recovered of {rows[0].instances} instances"
    found = {"planbench.svg": plots.bars(title, recovered)}
    series: dict[str, list[tuple[float, float]]] = {}
    for figure in Report.from_json(_read(folder, "speed")).figures:
        if figure.size:
            size = float(figure.size)
            series.setdefault(figure.name, []).append((size, figure.value))
            floor = series.setdefault(f"floor of {figure.name}", [])
            floor.append((size, figure.floor or 0.0))
    if series:
        found["speed.svg"] = plots.curves("Microseconds for each task", "tasks in the plan", series)
    return found


def write() -> list[Path]:
    """Update the pages and the plots; return the written files."""
    paths: list[Path] = []
    for page in PAGES:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
        paths.append(page)
    for name, svg in drawn().items():
        path = RESULTS / name
        path.write_text(svg, encoding="utf-8")
        paths.append(path)
    return paths


def _read(folder: Path, name: str) -> object:
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def _planbench_rows(data: object) -> list[planbench.Row]:
    stated = TypeAdapter(list[JsonObject]).validate_python(data)
    for row in stated:
        row.pop("percent", None)  # which follows from the others
    return TypeAdapter(list[planbench.Row]).validate_python(stated)


def _planbench(data: object) -> str:
    rows = _planbench_rows(data)
    sizes = {row.file: row.instances for row in rows}
    head = "| strategy |"
    rule = "|---|"
    for size in sizes.values():
        head += f" recovered of {size} | distance |"
        rule += "---|---|"
    lines = [head, rule]
    for strategy, words in ORDER.items():
        some = [row for row in rows if row.strategy == strategy]
        lines.append(f"| {words} | {' | '.join(map(_recovered, some))} |")
    return "\n".join([*lines, "", _trivial(rows)])


def _recovered(row: planbench.Row) -> str:
    distance = ""
    if row.distance is not None:
        distance = f"{row.distance:.2f}"
    return f"{row.percent:.1f} % ({row.low:.1f}–{row.high:.1f}) | {distance}"


def _trivial(rows: Sequence[planbench.Row]) -> str:
    instances = 0
    vain = 0
    vain_verified = 0
    trivial = 0
    early = 0
    changed = 0
    times: list[str] = []
    for row in rows:
        if row.strategy == "gpt4":
            instances += row.instances
            vain += row.vain
        elif row.strategy == "gpt4, verified":
            vain_verified += row.vain
        elif row.strategy == "repair":
            trivial += row.trivial
            early += row.early
            changed += row.false_interventions
            if row.p50 is not None and row.p99 is not None:
                times.append(f"{row.p50:.0f} / {row.p99:.0f} ms")
    return (
        "In brackets 95 % Wilson intervals. Distance: actions added and removed, mean over what was recovered. GPT-4's recorded "
        f"sentences are translated into replies of the `llm` provider. Alone, in {vain} of {instances} instances something was "
        f"begun that could not be done; verified, in {vain_verified}: what would fail is not begun, and a model asked once cannot "
        f"do more. The {trivial} further instances in which the event reaches the goal are apart: `repair` ended {early} of them "
        f"early and changed {changed}. From trigger to decision it took {', '.join(times)} (p50 / p99)."
    )


def _summary(folder: Path) -> str:
    """The most important figures, each with its comparison and its relevance."""
    rows = _planbench_rows(_read(folder, "planbench"))
    shares = {row.strategy: f"{row.percent:.1f} %" for row in rows if row.file == rows[0].file}
    outcomes = TypeAdapter(list[outages.Row]).validate_python(_read(folder, "tools"))
    recovered, proven = outages.recovered_and_proven(outcomes)
    runs = TypeAdapter(list[workflows.Row]).validate_python(_read(folder, "workflows"))
    report = Report.from_json(_read(folder, "speed"))
    chain = "trigger to revision, chain of"
    chains = [figure for figure in report.figures if figure.name.startswith(chain)]
    small, large = (figure for figure in chains if figure.name.endswith("tasks, p50"))
    size = large.name.removeprefix(chain).split()[0]
    own = report.peers[0]
    others = ", ".join(f"{peer.name} {peer.times:.1f} ×" for peer in report.peers[1:])
    finished = sum(row.finished for row in runs)
    repeated = sum(row.repeated for row in runs)
    makespan = statistics.median(row.makespan for row in runs)
    lines = [
        "| figure | result | compared with | why it matters |",
        "|---|---|---|---|",
        (
            f"| published plans recovered after an event (PlanBench, {rows[0].instances}) | {shares['repair']}, without a model "
            f"| GPT-4's replans alone {shares['gpt4']}; retrying the step {shares['retry']} | the run continues instead of ending |"
        ),
        (
            f"| outages of one or two tools in plans like agents' | {recovered} recovered, "
            f"{proven} proven hopeless | what the tools that are left allow "
            "| no way is missed, and nothing hopeless is tried for long |"
        ),
        _failing_tools(folder),
        (
            f"| real workflows in which 5 % of the tasks fail | {finished}/{len(runs)} finished, "
            f"{repeated} tasks repeated | {makespan:.2f} × the time "
            "without faults | finished work is kept |"
        ),
        (
            f"| from a failure to the repaired plan, p50 | {small.value:.0f} µs at 1,000 tasks "
            f"| {large.ratio:.2f} × as long at {size} tasks | large plans are repaired as fast |"
        ),
        f"| cost of a task, every tenth replaced | {own.value:.0f} µs | {others} | it can stay on |",
    ]
    return "\n".join(lines)


def _failing_tools(folder: Path) -> str:
    report = ToolsThatFail.from_json(_read(folder, "tools_that_fail"))
    explicit = ("explicit, reads", "explicit, changes")
    silent = ("silent, reads", "silent, changes not made")
    shares = []
    for agent in ("session", "tenacity", "LangGraph's retries", "pydantic-ai's retries"):
        shares.append(f"{report.share(agent, explicit):.0f} / {report.share(agent, silent):.0f} %")
    return (
        "| tools that fail / whose answer shows that it is wrong, at a service desk (tau-bench, 115 conversations) "
        f"| {shares[0]} handled | tenacity {shares[1]}; LangGraph's retries {shares[2]}; pydantic-ai's {shares[3]} "
        "| an agent does not act on a wrong answer |"
    )


def _workflows(data: object) -> str:
    return workflows.table(TypeAdapter(list[workflows.Row]).validate_python(data))


def _tools(data: object) -> str:
    return outages.table(TypeAdapter(list[outages.Row]).validate_python(data))


def _tools_that_fail(data: object) -> str:
    return ToolsThatFail.from_json(data).table()


def _effects(data: object) -> str:
    return Effects.from_json(data).table()


def _mapping(data: object) -> str:
    return Mapping.from_json(data).table()


def _report(data: object) -> str:
    return Report.from_json(data).table()


def _capacity(data: object) -> str:
    return Capacity.from_json(data).table()


def _fanout(data: object) -> str:
    return TypeAdapter(fanout.Report).validate_python(data).table()


_TABLES: dict[str, Callable[[object], str]] = {
    "planbench": _planbench,
    "workflows": _workflows,
    "tools": _tools,
    "tools_that_fail": _tools_that_fail,
    "effects": _effects,
    "mapping": _mapping,
    "speed": _report,
    "planning": _report,
    "capacity": _capacity,
    "lists": _report,
    "fanout": _fanout,
}
