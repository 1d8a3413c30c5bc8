"""Solves one problem of plan repair over facts: pure, and with nothing of the running plan in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, takewhile
from typing import Final, Literal, NamedTuple, TypeAlias

from replanning.facts import GroundAction, StripsStep, regress_at
from replanning.providers._grounding import MAX_ACTIONS, Domain, Grounding, ToolAction, action_key, reachable_actions
from replanning.providers._search import MAX_ASTAR_NODES, MAX_GREEDY_NODES, SearchResult, Target, find_cheapest_path

MAX_INLINE_NODES: Final = 300
"""How many states are looked at on the event loop; a longer search goes on in a thread."""

MAX_INLINE_ACTIONS: Final = 100
MAX_INLINE_STEPS: Final = 1_000
"""The same for uses of tools, and for suffixes times steps."""

MAX_SUFFIX_TARGETS: Final = 200
"""How many suffixes of the plan are tried as targets, besides the goal."""

SCRATCH_NODES: Final = 2_000
SCRATCH_GREEDY_NODES: Final = 50
SCRATCH_ACTIONS: Final = 1_000
"""How many states are looked at for a plan from scratch, which is only one more to choose from.

Of more uses of tools than so many, fewer in proportion: each of these is looked at in each state.
"""

_SuffixTarget: TypeAlias = tuple[int, frozenset[str] | None, float]

UnreachableKind: TypeAlias = Literal["proven-unreachable", "not-found-within-bound"]


class PlanRemainder(NamedTuple):
    """One way to look at what is left of a plan.

    Attributes:
        prefix: the steps that are kept and taken before the bridge.
        suffix: all that come after it, in order.
        removable: those of them that may be removed, the first ones first.
        min_removed: how many of these must be removed at least.
    """

    prefix: tuple[StripsStep, ...]
    suffix: tuple[StripsStep, ...]
    removable: tuple[StripsStep, ...]
    min_removed: int


@dataclass(frozen=True)
class RepairProblem:
    """What is to be solved for one part of a plan.

    Attributes:
        facts: what holds now.
        goal: what must hold at the end.
        domain: what can be done.
        remainders: where a bridge may go; the last one leaves most of the plan to be removed.
        costs: of the steps.
        stuck: the steps that cannot be taken.
    """

    facts: tuple[str, ...]
    goal: tuple[str, ...]
    domain: Domain
    remainders: tuple[PlanRemainder, ...]
    costs: Mapping[str, float]
    stuck: tuple[StripsStep, ...]


class Repair(NamedTuple):
    """A solution: the actions of the bridge, where it goes, and how many of the loose steps it removes."""

    kind: Literal["repair", "cheaper", "scratch"]
    remainder: PlanRemainder
    actions: tuple[ToolAction, ...]
    removed_count: int

    @property
    def removed_steps(self) -> tuple[StripsStep, ...]:
        """The steps that it removes."""
        return self.remainder.removable[: self.removed_count]

    @property
    def distance(self) -> int:
        """Actions added and removed; what is removed and added again is neither."""
        gone = Counter(action_key(step.tool, step.arguments) for step in self.removed_steps)
        new = Counter(action.key for action in self.actions)
        return gone.total() + new.total() - 2 * (gone & new).total()


class Solution(NamedTuple):
    """The ways that were found, the nearest first, or the verdict; neither where the bound was too small to tell."""

    repairs: tuple[Repair, ...] = ()
    unreachable: UnreachableKind | None = None


def solve(
    problem: RepairProblem, nodes: int = MAX_ASTAR_NODES, check_cancelled: Callable[[], None] = lambda: None
) -> Solution:
    """The distinct ways for one part of a plan: the nearest, the cheapest, and one from scratch.

    Args:
        problem: what is to be solved.
        nodes: how many states each search may look at; with fewer than `NODES`, nothing is concluded from that.
        look: called now and then; what it raises ends the search.
    """
    patient, search = nodes >= MAX_ASTAR_NODES, partial(find_cheapest_path, check_cancelled=check_cancelled)
    facts = dict.fromkeys(problem.facts)
    for step in problem.remainders[0].prefix:
        facts.update((fact, None) for fact in step.action.facts if fact in step.action.adds)
    if not patient and max(len(rest.removable) * len(rest.suffix) for rest in problem.remainders) > MAX_INLINE_STEPS:
        return Solution()
    grounded = reachable_actions(tuple(facts), problem.domain, MAX_ACTIONS if patient else MAX_INLINE_ACTIONS)
    if not patient and grounded.truncated:
        return Solution()
    near, found = [], []
    lasting = _static_facts(problem, grounded.actions)
    suffixes: list[_SuffixTarget] = []
    for rest in problem.remainders:
        suffixes = list(_suffix_targets(problem, rest, lasting))
        targets = [Target(needs, removed) for removed, needs, _ in suffixes]
        result = search(
            _initial_facts(problem, rest),
            targets,
            grounded.actions,
            nodes=nodes,
            greedy_nodes=MAX_GREEDY_NODES if patient else 0,
        )
        found.append(result)
        if result.actions is not None:
            near.append(Repair("repair", rest, result.actions, rest.min_removed + result.target))
    certain = all(result.conclusive for result in found)
    if not certain and not patient:
        return Solution()
    if not near:
        return Solution((), "proven-unreachable" if certain and grounded.complete else "not-found-within-bound")
    others = list(_other_repairs(problem, grounded, suffixes, search, nodes))
    if None in others and not patient:
        return Solution()
    ways = (min(near, key=lambda way: way.distance), *(way for way in others if way is not None))
    return Solution(tuple(_keep_repeated_steps(problem, way) for way in ways))


def _keep_repeated_steps(problem: RepairProblem, way: Repair) -> Repair:
    """The same way, with the steps left in their places that it would remove and do anew.

    All of them where they can go before what is new, else those with which it begins.
    """
    wanted = Counter(action.key for action in way.actions)
    same = [s for s in way.removed_steps if s.startable and _take(wanted, action_key(s.tool, s.arguments))]
    pairs = zip(way.removed_steps, way.actions, strict=False)
    first = list(
        takewhile(lambda pair: pair[0].startable and action_key(pair[0].tool, pair[0].arguments) == pair[1].key, pairs)
    )
    for steps in (same, [step for step, _ in first]):
        if steps and (shorter := _without(problem, way, steps)) is not None:
            return shorter
    return way


def _take(counts: Counter[str], key: str) -> bool:
    counts[key] -= 1
    return counts[key] >= 0


def _without(problem: RepairProblem, way: Repair, steps: Sequence[StripsStep]) -> Repair | None:
    """The way with these steps kept before the bridge; None where it would not lead there then."""
    kept = Counter(action_key(step.tool, step.arguments) for step in steps)
    actions = tuple(action for action in way.actions if not _take(kept, action.key))
    before, after, loose, _ = way.remainder
    stay = {step.id for step in steps}
    left = tuple(step for step in after if step.id not in stay)
    rest = PlanRemainder((*before, *steps), left, tuple(step for step in loose if step.id not in stay), 0)
    shorter = way._replace(remainder=rest, actions=actions, removed_count=way.removed_count - len(steps))
    gone = {step.id for step in shorter.removed_steps}
    follows = [step for step in rest.suffix if step.id not in gone]
    later = {step.id for step in rest.suffix}
    needs = regress_at(
        problem.goal, [*(s.action for s in steps), *map(_as_ground_action, actions), *(s.action for s in follows)]
    )[0]
    start = _initial_facts(problem, way.remainder)
    free = all(later.isdisjoint(step.depends_on) for step in steps)
    return shorter if free and needs is not None and needs <= start else None


def _as_ground_action(action: ToolAction) -> GroundAction:
    return GroundAction(frozenset(action.needs), frozenset(action.adds), frozenset(action.removes))


def _other_repairs(
    problem: RepairProblem,
    grounded: Grounding,
    suffixes: Sequence[_SuffixTarget],
    search: Callable[..., SearchResult],
    nodes: int,
) -> Iterator[Repair | None]:
    """The way that costs least, where costs differ, and one that leaves the old plan aside; None: not found in time."""
    rest = problem.remainders[-1]
    start, actions = _initial_facts(problem, rest), grounded.actions
    if len({action.cost for action in actions}) > 1:
        prices = [Target(needs, cost) for _, needs, cost in suffixes]
        result = search(start, prices, actions, weight=lambda action: action.cost, nodes=nodes, greedy=0)
        found = result.actions is not None
        yield Repair("cheaper", rest, result.actions or (), rest.min_removed + result.target) if found else None
    share = min(1.0, SCRATCH_ACTIONS / max(len(actions), 1))
    few, greedy = min(nodes, int(SCRATCH_NODES * share)), int(SCRATCH_GREEDY_NODES * share)
    result = search(start, [Target(suffixes[-1][1], 0)], actions, nodes=few, greedy=greedy)
    yield None if result.actions is None else Repair("scratch", rest, result.actions, len(rest.removable))


def _initial_facts(problem: RepairProblem, rest: PlanRemainder) -> frozenset[str]:
    facts = set(problem.facts)
    for step in rest.prefix:
        facts -= step.action.removes
        facts |= step.action.adds
    return frozenset(facts)


def _static_facts(problem: RepairProblem, actions: Sequence[ToolAction]) -> frozenset[str]:
    """What holds and nothing takes away: with it left out, what must hold before long rests of a plan stays short."""
    rest = problem.remainders[-1]
    removed = {fact for step in (*rest.prefix, *rest.suffix) for fact in step.action.removes}
    return frozenset(problem.facts).difference(removed, *(action.removes for action in actions))


def _suffix_targets(problem: RepairProblem, rest: PlanRemainder, lasting: frozenset[str]) -> Iterator[_SuffixTarget]:
    """By how many loose steps are removed: what else must hold before the steps that are kept, and what these cost.

    What must hold behind a step that stays is worked out once: the later ones are the same for all shorter removals.
    """
    place = {step.id: number for number, step in enumerate(rest.suffix)}
    loose = [place[step.id] for step in rest.removable]
    movable = set(loose)
    staying = [number for number in range(len(rest.suffix)) if number not in movable]
    last = list(accumulate(loose, max, initial=-1))
    tried = {*range(rest.min_removed, min(rest.min_removed + MAX_SUFFIX_TARGETS, len(loose)) + 1), len(loose)}
    uses = [step.action._replace(requires=step.action.requires - lasting) for step in rest.suffix]
    goal = frozenset(problem.goal) - lasting
    behind = regress_at(goal, uses, {last[removed] + 1 for removed in tried})
    cost = sum(problem.costs[step.id] for step in rest.suffix)
    cost -= sum(problem.costs[step.id] for step in rest.removable[: rest.min_removed])
    for removed in range(rest.min_removed, len(loose) + 1):
        after = behind[last[removed] + 1] if removed in tried else None
        if after is None:
            yield removed, None, cost
        else:
            before = sorted(number for number in (*staying, *loose[removed:]) if number < last[removed])
            yield removed, regress_at(after, [uses[number] for number in before])[0], cost
        cost -= problem.costs[rest.removable[removed].id] if removed < len(loose) else 0.0
