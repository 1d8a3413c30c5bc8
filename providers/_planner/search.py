"""Finds the way with the fewest changes from what holds now back into a plan.

A* (Hart, Nilsson and Raphael 1968) over sets of facts, towards several targets at once, each with the price of
what it leaves out of the plan; its heuristic counts the facts that a target lacks, divided by the most that one
action adds, and never says too much. Where that takes too long, greedy best-first search with the additive
heuristic (Bonet and Geffner 2001) takes over, whose way may be longer. Both are bounded in nodes, never by the
clock, and go by the order in which things are stated.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, takewhile
from typing import Final, Literal, NamedTuple, TypeAlias

from replanning.live import GroundAction, StripsStep, regress_at
from replanning.providers._planner.domain import (
    MAX_ACTIONS,
    Domain,
    Grounding,
    ToolAction,
    action_key,
    reachable_actions,
)

MAX_ASTAR_NODES: Final = 20_000
"""How many states A* looks at."""

MAX_GREEDY_NODES: Final = 3_000
"""How many states greedy search looks at."""

NODES_PER_CANCEL_CHECK: Final = 50
"""After how many states whoever wants a search is asked whether it is still wanted."""

_INFINITY: Final = 1 << 40


class Target(NamedTuple):
    """Where a way may lead: the facts that must hold there (None: it leads nowhere), and the price of what it leaves out."""

    needs: frozenset[str] | None
    cost: float


class SearchResult(NamedTuple):
    """The way to one of the targets, if there is one; `conclusive` says that this is certain, and there is no better."""

    actions: tuple[ToolAction, ...] | None
    target: int
    conclusive: bool
    nodes: int


class _Move(NamedTuple):
    needs: int
    adds: int
    removes: int
    weight: float
    action: ToolAction


@dataclass(frozen=True, slots=True)
class _SearchSpace:
    """A search space in which each fact is one bit."""

    start: int
    moves: tuple[_Move, ...]
    goals: tuple[tuple[int, float, int], ...]
    min_weight: float
    max_adds: int

    def heuristic(self, state: int) -> float:
        """Never more than what the best way from a state still costs."""
        most, step = self.max_adds, self.min_weight
        return min(
            price + ((-(-(needs & ~state).bit_count() // most)) * step if needs & ~state else 0)
            for needs, price, _ in self.goals
        )

    def successors(self, state: int) -> Iterator[tuple[int, float, ToolAction]]:
        """The states that one action leads to, with its weight."""
        for needs, adds, removes, weight, action in self.moves:
            if not needs & ~state:
                yield (state & ~removes) | adds, weight, action

    def satisfied_target(self, state: int) -> tuple[float, int] | None:
        """The cheapest target that a state satisfies: its price and number."""
        return min(((price, number) for needs, price, number in self.goals if not needs & ~state), default=None)


def find_cheapest_path(
    start: Iterable[str],
    targets: Sequence[Target],
    actions: Sequence[ToolAction],
    *,
    weight: Callable[[ToolAction], float] = lambda action: 1,
    nodes: int = MAX_ASTAR_NODES,
    greedy_nodes: int = MAX_GREEDY_NODES,
    check_cancelled: Callable[[], None] = lambda: None,
) -> SearchResult:
    """The cheapest way from facts to one of the targets.

    Args:
        start: what holds.
        targets: where to; of equal ones the first is taken.
        actions: what can be done.
        weight: what an action adds to the price.
        nodes: how many states A* may look at.
        greedy: how many greedy search may, where A* has found nothing within its bound.
        look: called now and then; what it raises ends the search.
    """
    space = _build_space(start, targets, actions, weight)
    if space is None:
        return SearchResult(None, -1, True, 0)
    found = _a_star(space, nodes, check_cancelled)
    if found.actions is None and not found.conclusive and greedy_nodes:
        return _greedy_search(space, greedy_nodes, check_cancelled)
    return found


def _build_space(
    start: Iterable[str],
    targets: Sequence[Target],
    actions: Sequence[ToolAction],
    weight: Callable[[ToolAction], float],
) -> _SearchSpace | None:
    """The space of a search; None where no target can be reached even if nothing were ever removed."""
    holds = frozenset(start)
    actions = _relevant_actions(holds, targets, actions)
    within_reach = holds.union(*(action.adds for action in actions))
    changing = dict.fromkeys(fact for action in actions for fact in (*action.adds, *action.removes))
    bits = {fact: 1 << number for number, fact in enumerate(changing)}
    goals = []
    for number, (needs, price) in enumerate(targets):
        if needs is not None and needs <= within_reach:
            goals.append((_mask(needs, bits), price, number))
    if not goals:
        return None
    moves = tuple(
        _Move(_mask(a.needs, bits), _mask(a.adds, bits), _mask(a.removes, bits), weight(a), a)
        for a in actions
        if within_reach.issuperset(a.needs)
    )
    most = max((move.adds.bit_count() for move in moves), default=1)
    least = min((move.weight for move in moves), default=0)
    return _SearchSpace(_mask(holds, bits), moves, tuple(goals), least, max(most, 1))


def _relevant_actions(
    holds: frozenset[str], targets: Sequence[Target], actions: Sequence[ToolAction]
) -> list[ToolAction]:
    """The actions that can have a part in a way: they add what is lacking, or would be after others that do.

    Of every way that has others in it, what is left without them is a way as well.
    """
    adding: dict[str, list[int]] = {}
    for number, action in enumerate(actions):
        for fact in action.adds:
            adding.setdefault(fact, []).append(number)
    needed = {fact for needs, _ in targets for fact in needs or ()}
    removed: set[str] = set()
    lacking = list(needed - holds)
    seen = set(lacking)
    chosen: set[int] = set()
    while lacking:
        for number in adding.get(lacking.pop(), ()):
            if number not in chosen:
                chosen.add(number)
                action = actions[number]
                needed.update(action.needs)
                removed.update(action.removes)
                both = [f for f in (*action.needs, *action.removes) if f in needed and (f in removed or f not in holds)]
                lacking += [fact for fact in both if fact not in seen]
                seen.update(both)
    return [actions[number] for number in sorted(chosen)]


def _mask(facts: Iterable[str], bits: dict[str, int]) -> int:
    mask = 0
    for fact in facts:
        mask |= bits.get(fact, 0)
    return mask


class _Node(NamedTuple):
    state: int
    parent: _Node | None
    action: ToolAction | None

    def path(self) -> tuple[ToolAction, ...]:
        """The actions that lead here."""
        return tuple(_backtrack(self))[::-1]


def _backtrack(node: _Node | None) -> Iterator[ToolAction]:
    while node is not None and node.action is not None:
        yield node.action
        node = node.parent


def _a_star(space: _SearchSpace, limit: int, look: Callable[[], None]) -> SearchResult:
    """A*."""
    root, first = _Node(space.start, None, None), space.heuristic(space.start)
    queue: list[tuple[float, float, int, float, _Node]] = [(first, first, 0, 0.0, root)]
    cheapest = {space.start: 0.0}
    best = SearchResult(None, -1, True, 0)
    price, nodes = float(_INFINITY), 0
    while queue:
        estimate, _, _, spent, node = heapq.heappop(queue)
        if estimate >= price:
            break
        if spent > cheapest[node.state]:
            continue
        nodes += 1
        if nodes > limit:
            return best._replace(conclusive=False, nodes=nodes)
        if not nodes % NODES_PER_CANCEL_CHECK:
            look()
        there = space.satisfied_target(node.state)
        if there is not None and spent + there[0] < price:
            price, best = spent + there[0], SearchResult(node.path(), there[1], True, nodes)
        for follows, weight, action in space.successors(node.state):
            total = spent + weight
            if total < cheapest.get(follows, _INFINITY):
                cheapest[follows] = total
                ahead = space.heuristic(follows)
                heapq.heappush(queue, (total + ahead, ahead, len(cheapest), total, _Node(follows, node, action)))
    return best._replace(nodes=nodes)


def _greedy_search(space: _SearchSpace, limit: int, look: Callable[[], None]) -> SearchResult:
    """Greedy best-first search: always on from the state that looks nearest to a target."""
    distance = _AdditiveHeuristic(space)
    root = _Node(space.start, None, None)
    queue: list[tuple[float, int, _Node]] = [(distance(space.start), 0, root)]
    seen = {space.start}
    nodes = 0
    while queue and nodes < limit:
        nodes += 1
        if not nodes % NODES_PER_CANCEL_CHECK:
            look()
        node = heapq.heappop(queue)[2]
        there = space.satisfied_target(node.state)
        if there is not None:
            return SearchResult(node.path(), there[1], False, nodes)
        for follows, _, action in space.successors(node.state):
            if follows not in seen:
                seen.add(follows)
                ahead = distance(follows)
                if ahead < _INFINITY:
                    heapq.heappush(queue, (ahead, len(seen), _Node(follows, node, action)))
    return SearchResult(None, -1, not queue, nodes)


class _AdditiveHeuristic:
    """The additive heuristic: what the facts of a target cost, each as if it were reached alone."""

    def __init__(self, space: _SearchSpace) -> None:
        self._goals = [(list(_bits(needs)), price) for needs, price, _ in space.goals]
        self._moves = [(list(_bits(m.needs)), list(_bits(m.adds)), m.weight) for m in space.moves]
        masks = [
            space.start,
            *(m.adds | m.removes | m.needs for m in space.moves),
            *(needs for needs, _, _ in space.goals),
        ]
        self._size = max(masks).bit_length()
        self._users: list[list[int]] = [[] for _ in range(self._size)]
        for number, (needs, _, _) in enumerate(self._moves):
            for fact in needs:
                self._users[fact].append(number)

    def __call__(self, state: int) -> float:
        costs: list[float] = [_INFINITY] * self._size
        left = [len(needs) for needs, _, _ in self._moves]
        sums = [0.0] * len(left)
        queue = [(0.0, fact) for fact in _bits(state) if fact < self._size]
        queue += [(weight, fact) for needs, adds, weight in self._moves if not needs for fact in adds]
        heapq.heapify(queue)
        while queue:
            cost, fact = heapq.heappop(queue)
            if cost >= costs[fact]:
                continue
            costs[fact] = cost
            for number in self._users[fact]:
                left[number] -= 1
                sums[number] += cost
                if not left[number]:
                    _, adds, weight = self._moves[number]
                    for added in adds:
                        if sums[number] + weight < costs[added]:
                            heapq.heappush(queue, (sums[number] + weight, added))
        return min(price + sum(costs[fact] for fact in needs) for needs, price in self._goals)


def _bits(mask: int) -> Iterator[int]:
    number = 0
    while mask:
        low = (mask & -mask).bit_length()
        number += low
        yield number - 1
        mask >>= low


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
        result = search(start, prices, actions, weight=lambda action: action.cost, nodes=nodes, greedy_nodes=0)
        found = result.actions is not None
        yield Repair("cheaper", rest, result.actions or (), rest.min_removed + result.target) if found else None
    share = min(1.0, SCRATCH_ACTIONS / max(len(actions), 1))
    few, greedy = min(nodes, int(SCRATCH_NODES * share)), int(SCRATCH_GREEDY_NODES * share)
    result = search(start, [Target(suffixes[-1][1], 0)], actions, nodes=few, greedy_nodes=greedy)
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
