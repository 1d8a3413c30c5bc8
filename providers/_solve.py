"""Solves one problem of plan repair over facts: pure, and with nothing of the running plan in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, takewhile
from typing import Final, Literal, NamedTuple, TypeAlias

from replanning.facts import Step, Use, needed_before
from replanning.providers._grounding import MOST, Action, Domain, Grounded, reachable, use_key
from replanning.providers._search import GREEDY_NODES, NODES, Found, Target, find

AT_ONCE: Final = 300
"""How many states are looked at on the event loop; a longer search goes on in a thread."""

AT_ONCE_USES: Final = 100
AT_ONCE_STEPS: Final = 1_000
"""The same for uses of tools, and for suffixes times steps."""

SUFFIXES: Final = 200
"""How many suffixes of the plan are tried as targets, besides the goal."""

FRESH_NODES: Final = 2_000
FRESH_GREEDY: Final = 50
FRESH_USES: Final = 1_000
"""How many states are looked at for a plan from scratch, which is only one more to choose from.

Of more uses of tools than so many, fewer in proportion: each of these is looked at in each state.
"""

_Suffix: TypeAlias = tuple[int, frozenset[str] | None, float]

Verdict: TypeAlias = Literal["proven-unreachable", "not-found-within-bound"]


class Rest(NamedTuple):
    """One way to look at what is left of a plan.

    Attributes:
        before: the steps that are kept and taken before the bridge.
        after: all that come after it, in order.
        loose: those of them that may be removed, the first ones first.
        least: how many of these must be removed at least.
    """

    before: tuple[Step, ...]
    after: tuple[Step, ...]
    loose: tuple[Step, ...]
    least: int


@dataclass(frozen=True)
class Problem:
    """What is to be solved for one part of a plan.

    Attributes:
        facts: what holds now.
        goal: what must hold at the end.
        domain: what can be done.
        rests: where a bridge may go; the last one leaves most of the plan to be removed.
        costs: of the steps.
        stuck: the steps that cannot be taken.
    """

    facts: tuple[str, ...]
    goal: tuple[str, ...]
    domain: Domain
    rests: tuple[Rest, ...]
    costs: Mapping[str, float]
    stuck: tuple[Step, ...]


class Way(NamedTuple):
    """A solution: the actions of the bridge, where it goes, and how many of the loose steps it removes."""

    kind: Literal["repair", "cheaper", "scratch"]
    rest: Rest
    actions: tuple[Action, ...]
    removed: int

    @property
    def gone(self) -> tuple[Step, ...]:
        """The steps that it removes."""
        return self.rest.loose[: self.removed]

    @property
    def distance(self) -> int:
        """Actions added and removed; what is removed and added again is neither."""
        gone = Counter(use_key(step.tool, step.arguments) for step in self.gone)
        new = Counter(action.key for action in self.actions)
        return gone.total() + new.total() - 2 * (gone & new).total()


class Solution(NamedTuple):
    """The ways that were found, the nearest first, or the verdict; neither where the bound was too small to tell."""

    ways: tuple[Way, ...] = ()
    verdict: Verdict | None = None


def solve(problem: Problem, nodes: int = NODES, look: Callable[[], None] = lambda: None) -> Solution:
    """The distinct ways for one part of a plan: the nearest, the cheapest, and one from scratch.

    Args:
        problem: what is to be solved.
        nodes: how many states each search may look at; with fewer than `NODES`, nothing is concluded from that.
        look: called now and then; what it raises ends the search.
    """
    patient, search = nodes >= NODES, partial(find, look=look)
    facts = dict.fromkeys(problem.facts)
    for step in problem.rests[0].before:
        facts.update((fact, None) for fact in step.use.stated if fact in step.use.adds)
    if not patient and max(len(rest.loose) * len(rest.after) for rest in problem.rests) > AT_ONCE_STEPS:
        return Solution()
    grounded = reachable(tuple(facts), problem.domain, MOST if patient else AT_ONCE_USES)
    if not patient and grounded.cut:
        return Solution()
    near, found = [], []
    lasting = _lasting(problem, grounded.actions)
    suffixes: list[_Suffix] = []
    for rest in problem.rests:
        suffixes = list(_suffixes(problem, rest, lasting))
        targets = [Target(needs, removed) for removed, needs, _ in suffixes]
        result = search(
            _start(problem, rest), targets, grounded.actions, nodes=nodes, greedy=GREEDY_NODES if patient else 0
        )
        found.append(result)
        if result.actions is not None:
            near.append(Way("repair", rest, result.actions, rest.least + result.target))
    certain = all(result.finished for result in found)
    if not certain and not patient:
        return Solution()
    if not near:
        return Solution((), "proven-unreachable" if certain and grounded.complete else "not-found-within-bound")
    others = list(_others(problem, grounded, suffixes, search, nodes))
    if None in others and not patient:
        return Solution()
    ways = (min(near, key=lambda way: way.distance), *(way for way in others if way is not None))
    return Solution(tuple(_kept(problem, way) for way in ways))


def _kept(problem: Problem, way: Way) -> Way:
    """The same way, with the steps left in their places that it would remove and do anew.

    All of them where they can go before what is new, else those with which it begins.
    """
    wanted = Counter(action.key for action in way.actions)
    same = [s for s in way.gone if s.usable and _take(wanted, use_key(s.tool, s.arguments))]
    pairs = zip(way.gone, way.actions, strict=False)
    first = list(
        takewhile(lambda pair: pair[0].usable and use_key(pair[0].tool, pair[0].arguments) == pair[1].key, pairs)
    )
    for steps in (same, [step for step, _ in first]):
        if steps and (shorter := _without(problem, way, steps)) is not None:
            return shorter
    return way


def _take(counts: Counter[str], key: str) -> bool:
    counts[key] -= 1
    return counts[key] >= 0


def _without(problem: Problem, way: Way, steps: Sequence[Step]) -> Way | None:
    """The way with these steps kept before the bridge; None where it would not lead there then."""
    kept = Counter(use_key(step.tool, step.arguments) for step in steps)
    actions = tuple(action for action in way.actions if not _take(kept, action.key))
    before, after, loose, _ = way.rest
    stay = {step.id for step in steps}
    left = tuple(step for step in after if step.id not in stay)
    rest = Rest((*before, *steps), left, tuple(step for step in loose if step.id not in stay), 0)
    shorter = way._replace(rest=rest, actions=actions, removed=way.removed - len(steps))
    gone = {step.id for step in shorter.gone}
    follows = [step for step in rest.after if step.id not in gone]
    later = {step.id for step in rest.after}
    needs = needed_before(problem.goal, [*(s.use for s in steps), *map(_use, actions), *(s.use for s in follows)])[0]
    start = _start(problem, way.rest)
    free = all(later.isdisjoint(step.after) for step in steps)
    return shorter if free and needs is not None and needs <= start else None


def _use(action: Action) -> Use:
    return Use(frozenset(action.needs), frozenset(action.adds), frozenset(action.removes))


def _others(
    problem: Problem, grounded: Grounded, suffixes: Sequence[_Suffix], search: Callable[..., Found], nodes: int
) -> Iterator[Way | None]:
    """The way that costs least, where costs differ, and one that leaves the old plan aside; None: not found in time."""
    rest = problem.rests[-1]
    start, actions = _start(problem, rest), grounded.actions
    if len({action.cost for action in actions}) > 1:
        prices = [Target(needs, cost) for _, needs, cost in suffixes]
        result = search(start, prices, actions, weight=lambda action: action.cost, nodes=nodes, greedy=0)
        found = result.actions is not None
        yield Way("cheaper", rest, result.actions or (), rest.least + result.target) if found else None
    share = min(1.0, FRESH_USES / max(len(actions), 1))
    few, greedy = min(nodes, int(FRESH_NODES * share)), int(FRESH_GREEDY * share)
    result = search(start, [Target(suffixes[-1][1], 0)], actions, nodes=few, greedy=greedy)
    yield None if result.actions is None else Way("scratch", rest, result.actions, len(rest.loose))


def _start(problem: Problem, rest: Rest) -> frozenset[str]:
    facts = set(problem.facts)
    for step in rest.before:
        facts -= step.use.removes
        facts |= step.use.adds
    return frozenset(facts)


def _lasting(problem: Problem, actions: Sequence[Action]) -> frozenset[str]:
    """What holds and nothing takes away: with it left out, what must hold before long rests of a plan stays short."""
    rest = problem.rests[-1]
    removed = {fact for step in (*rest.before, *rest.after) for fact in step.use.removes}
    return frozenset(problem.facts).difference(removed, *(action.removes for action in actions))


def _suffixes(problem: Problem, rest: Rest, lasting: frozenset[str]) -> Iterator[_Suffix]:
    """By how many loose steps are removed: what else must hold before the steps that are kept, and what these cost.

    What must hold behind a step that stays is worked out once: the later ones are the same for all shorter removals.
    """
    place = {step.id: number for number, step in enumerate(rest.after)}
    loose = [place[step.id] for step in rest.loose]
    movable = set(loose)
    staying = [number for number in range(len(rest.after)) if number not in movable]
    last = list(accumulate(loose, max, initial=-1))
    tried = {*range(rest.least, min(rest.least + SUFFIXES, len(loose)) + 1), len(loose)}
    uses = [step.use._replace(needs=step.use.needs - lasting) for step in rest.after]
    goal = frozenset(problem.goal) - lasting
    behind = needed_before(goal, uses, {last[removed] + 1 for removed in tried})
    cost = sum(problem.costs[step.id] for step in rest.after)
    cost -= sum(problem.costs[step.id] for step in rest.loose[: rest.least])
    for removed in range(rest.least, len(loose) + 1):
        after = behind[last[removed] + 1] if removed in tried else None
        if after is None:
            yield removed, None, cost
        else:
            before = sorted(number for number in (*staying, *loose[removed:]) if number < last[removed])
            yield removed, needed_before(after, [uses[number] for number in before])[0], cost
        cost -= problem.costs[rest.loose[removed].id] if removed < len(loose) else 0.0
