"""Search for the bridge with the fewest changes from the current facts back into a plan.

A* (Hart, Nilsson and Raphael 1968) over sets of facts, towards several targets at once, each with
the cost of the steps that it leaves out. Its heuristic, the number of facts that a target lacks
divided by the most that one action adds, is admissible. If that takes too long, greedy best-first
search with the additive heuristic (Bonet and Geffner 2001) takes over, whose result may not be
optimal. Both are bounded by nodes, never by the clock, and depend on the order in which tools and
facts are stated.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Final, Literal, NamedTuple, TypeAlias

from replanning.live import GroundAction, StripsStep
from replanning.live.strips import regress_at
from replanning.providers._planner.domain import (
    MAX_ACTIONS,
    Domain,
    ToolAction,
    action_key,
    reachable_actions,
)

MAX_ASTAR_NODES: Final = 20_000
"""Most states that A* expands."""

MAX_GREEDY_NODES: Final = 3_000
"""Most states that greedy search expands."""

NODES_PER_CANCEL_CHECK: Final = 50
"""States that are expanded between two checks for cancellation."""

_INFINITY: Final = 1 << 40


class Target(NamedTuple):
    """Target of a search: the facts that must hold (None: unreachable), and the cost of the steps it leaves out."""

    needs: frozenset[str] | None
    cost: float


class SearchResult(NamedTuple):
    """Actions that lead to one of the targets, or None; `conclusive` if there certainly is no better result."""

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
    """Search space in which each fact is one bit of a state."""

    start: int
    moves: tuple[_Move, ...]
    goals: tuple[tuple[int, float, int], ...]
    min_weight: float
    max_adds: int

    def heuristic(self, state: int) -> float:
        """Return a lower bound of the cost from a state to a target."""
        return min(
            cost + math.ceil((needs & ~state).bit_count() / self.max_adds) * self.min_weight
            for needs, cost, _ in self.goals
        )

    def successors(self, state: int) -> Iterator[tuple[int, float, ToolAction]]:
        """Yield the states to which one action leads, with its weight."""
        for needs, adds, removes, weight, action in self.moves:
            if not needs & ~state:
                yield (state & ~removes) | adds, weight, action

    def satisfied_target(self, state: int) -> tuple[float, int] | None:
        """Return the cost and number of the cheapest target that a state satisfies."""
        return min(
            ((cost, number) for needs, cost, number in self.goals if not needs & ~state),
            default=None,
        )


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
    """Return the cheapest sequence of actions from facts to one of the targets.

    Args:
        start: facts that hold.
        targets: of equally cheap ones the first is taken.
        actions: actions that can be used.
        weight: cost of an action.
        nodes: most states that A* expands.
        greedy_nodes: most states that greedy search expands, if A* has found no result within its
            bound.
        check_cancelled: called now and then; an exception of it ends the search.
    """
    holds = frozenset(start)
    # Only actions that can contribute are tried: they add facts that are missing, or will be after
    # other such actions. From every plan with other actions, these can be left out.
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
                both = [
                    f
                    for f in (*action.needs, *action.removes)
                    if f in needed and (f in removed or f not in holds)
                ]
                lacking += [fact for fact in both if fact not in seen]
                seen.update(both)
    actions = [actions[number] for number in sorted(chosen)]
    # Targets that are out of reach in the delete relaxation are left out.
    within_reach = holds.union(*(action.adds for action in actions))
    changing = dict.fromkeys(fact for action in actions for fact in (*action.adds, *action.removes))
    bits = {fact: 1 << number for number, fact in enumerate(changing)}
    goals = [
        (_mask(needs, bits), cost, number)
        for number, (needs, cost) in enumerate(targets)
        if needs is not None and needs <= within_reach
    ]
    if not goals:
        return SearchResult(None, -1, True, 0)
    moves = tuple(
        _Move(_mask(a.needs, bits), _mask(a.adds, bits), _mask(a.removes, bits), weight(a), a)
        for a in actions
        if within_reach.issuperset(a.needs)
    )
    most = max((move.adds.bit_count() for move in moves), default=1)
    least = min((move.weight for move in moves), default=0)
    space = _SearchSpace(_mask(holds, bits), moves, tuple(goals), least, max(most, 1))
    result = _a_star(space, nodes, check_cancelled)
    if result.actions is None and not result.conclusive and greedy_nodes:
        return _greedy_search(space, greedy_nodes, check_cancelled)
    return result


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
        """Return the actions from the start to this state."""
        actions: list[ToolAction] = []
        node: _Node | None = self
        while node is not None and node.action is not None:
            actions.append(node.action)
            node = node.parent
        return tuple(reversed(actions))


def _a_star(space: _SearchSpace, limit: int, check_cancelled: Callable[[], None]) -> SearchResult:
    root = _Node(space.start, None, None)
    first = space.heuristic(space.start)
    queue: list[tuple[float, float, int, float, _Node]] = [(first, first, 0, 0.0, root)]
    cheapest = {space.start: 0.0}
    best = SearchResult(None, -1, True, 0)
    best_cost = float(_INFINITY)
    nodes = 0
    while queue:
        estimate, _, _, spent, node = heapq.heappop(queue)
        if estimate >= best_cost:
            break
        if spent > cheapest[node.state]:
            continue
        nodes += 1
        if nodes > limit:
            return best._replace(conclusive=False, nodes=nodes)
        if not nodes % NODES_PER_CANCEL_CHECK:
            check_cancelled()
        target = space.satisfied_target(node.state)
        if target is not None and spent + target[0] < best_cost:
            best_cost = spent + target[0]
            best = SearchResult(node.path(), target[1], True, nodes)
        for successor, weight, action in space.successors(node.state):
            total = spent + weight
            if total < cheapest.get(successor, _INFINITY):
                cheapest[successor] = total
                ahead = space.heuristic(successor)
                heapq.heappush(
                    queue,
                    (total + ahead, ahead, len(cheapest), total, _Node(successor, node, action)),
                )
    return best._replace(nodes=nodes)


def _greedy_search(
    space: _SearchSpace, limit: int, check_cancelled: Callable[[], None]
) -> SearchResult:
    """Run greedy best-first search: expand the state that looks nearest to a target."""
    distance = _additive_heuristic(space)
    root = _Node(space.start, None, None)
    queue: list[tuple[float, int, _Node]] = [(distance(space.start), 0, root)]
    seen = {space.start}
    nodes = 0
    while queue and nodes < limit:
        nodes += 1
        if not nodes % NODES_PER_CANCEL_CHECK:
            check_cancelled()
        node = heapq.heappop(queue)[2]
        target = space.satisfied_target(node.state)
        if target is not None:
            return SearchResult(node.path(), target[1], False, nodes)
        for successor, _, action in space.successors(node.state):
            if successor not in seen:
                seen.add(successor)
                ahead = distance(successor)
                if ahead < _INFINITY:
                    heapq.heappush(queue, (ahead, len(seen), _Node(successor, node, action)))
    return SearchResult(None, -1, not queue, nodes)


def _additive_heuristic(space: _SearchSpace) -> Callable[[int], float]:
    """Return the additive heuristic: the sum of the costs of a target's facts, each as if it were reached alone."""
    goals = [(list(_bits(needs)), cost) for needs, cost, _ in space.goals]
    moves = [(list(_bits(m.needs)), list(_bits(m.adds)), m.weight) for m in space.moves]
    masks = (
        *(needs for needs, _, _ in space.goals),
        *(m.adds | m.removes | m.needs for m in space.moves),
    )
    size = max(space.start, *masks).bit_length()
    users: list[list[int]] = [[] for _ in range(size)]
    for number, (needs, _, _) in enumerate(moves):
        for fact in needs:
            users[fact].append(number)

    def distance(state: int) -> float:
        costs: list[float] = [_INFINITY] * size
        left = [len(needs) for needs, _, _ in moves]
        sums = [0.0] * len(left)
        queue = [(0.0, fact) for fact in _bits(state) if fact < size]
        queue += [(weight, fact) for needs, adds, weight in moves if not needs for fact in adds]
        heapq.heapify(queue)
        while queue:
            cost, fact = heapq.heappop(queue)
            if cost >= costs[fact]:
                continue
            costs[fact] = cost
            for number in users[fact]:
                left[number] -= 1
                sums[number] += cost
                if not left[number]:
                    _, adds, weight = moves[number]
                    for added in adds:
                        if sums[number] + weight < costs[added]:
                            heapq.heappush(queue, (sums[number] + weight, added))
        return min(target_cost + sum(costs[fact] for fact in needs) for needs, target_cost in goals)

    return distance


def _bits(mask: int) -> Iterator[int]:
    number = 0
    while mask:
        low = (mask & -mask).bit_length()
        number += low
        yield number - 1
        mask >>= low


MAX_INLINE_NODES: Final = 300
"""Most states that are expanded on the event loop; longer searches run in a thread."""

MAX_INLINE_ACTIONS: Final = 100
MAX_INLINE_STEPS: Final = 1_000
"""Likewise, most actions, and most suffixes times steps."""

MAX_SUFFIX_TARGETS: Final = 200
"""Most suffixes of the plan that are targets, besides the goal."""

SCRATCH_NODES: Final = 2_000
SCRATCH_GREEDY_NODES: Final = 50
SCRATCH_ACTIONS: Final = 1_000
"""Bounds of the search for a plan from scratch, which is only an additional choice.

With more actions than these, the bounds of nodes shrink in proportion, because each state tries
each action.
"""

SHORTCUT_CHOICES: Final = 100
"""Product of actions and suffixes up to which the search for a cheaper plan expands all its states;
fewer above.
"""

_SuffixTarget: TypeAlias = tuple[int, frozenset[str] | None, float]


class PlanRemainder(NamedTuple):
    """Remaining steps of a plan, divided at the place of the bridge.

    Attributes:
        prefix: steps that are kept before the bridge.
        suffix: all steps after it, in order.
        removable: those steps of the suffix that may be removed, the first ones first.
        min_removed: number of removable steps that must be removed at least.
    """

    prefix: tuple[StripsStep, ...]
    suffix: tuple[StripsStep, ...]
    removable: tuple[StripsStep, ...]
    min_removed: int


@dataclass(frozen=True)
class RepairProblem:
    """Repair problem of one part of a plan.

    Attributes:
        facts: facts that hold now.
        goal: facts that must hold at the end.
        domain: available tools and values.
        remainders: places of a bridge; with the last one, most of the plan can be removed.
        costs: of the steps, by id.
        stuck: steps that cannot be executed.
    """

    facts: tuple[str, ...]
    goal: tuple[str, ...]
    domain: Domain
    remainders: tuple[PlanRemainder, ...]
    costs: Mapping[str, float]
    stuck: tuple[StripsStep, ...]


class Repair(NamedTuple):
    """Solution: the actions of the bridge, its place, and the number of removable steps that it removes."""

    kind: Literal["repair", "cheaper", "scratch", "shortcut", "superfluous"]
    remainder: PlanRemainder
    actions: tuple[ToolAction, ...]
    removed_count: int

    @property
    def removed_steps(self) -> tuple[StripsStep, ...]:
        """Steps that it removes."""
        return self.remainder.removable[: self.removed_count]

    @property
    def distance(self) -> int:
        """Number of actions added and removed; an action that is removed and added again counts as neither."""
        removed = Counter(action_key(step.tool, step.arguments) for step in self.removed_steps)
        added = Counter(action.key for action in self.actions)
        return removed.total() + added.total() - 2 * (removed & added).total()


class Solution(NamedTuple):
    """Repairs, the nearest first, or the verdict; neither if the bound was too small for a verdict."""

    repairs: tuple[Repair, ...] = ()
    unreachable: Literal["proven-unreachable", "not-found-within-bound"] | None = None


def solve(
    problem: RepairProblem,
    nodes: int = MAX_ASTAR_NODES,
    check_cancelled: Callable[[], None] = lambda: None,
) -> Solution:
    """Return the distinct repairs of one part of a plan: the nearest, the cheapest, and one from scratch.

    Args:
        problem: the problem.
        nodes: most states that each search expands; with fewer than `MAX_ASTAR_NODES`, there is no
            verdict when they are used up.
        check_cancelled: called now and then; an exception of it ends the search.
    """
    patient = nodes >= MAX_ASTAR_NODES
    search = partial(find_cheapest_path, check_cancelled=check_cancelled)
    facts = dict.fromkeys(problem.facts)
    for step in problem.remainders[0].prefix:
        facts.update((fact, None) for fact in step.action.facts if fact in step.action.adds)
    if (
        not patient
        and max(len(rest.removable) * len(rest.suffix) for rest in problem.remainders)
        > MAX_INLINE_STEPS
    ):
        return Solution()
    grounded = reachable_actions(
        tuple(facts), problem.domain, MAX_ACTIONS if patient else MAX_INLINE_ACTIONS
    )
    if not patient and grounded.truncated:
        return Solution()
    near = []
    results = []
    whole = problem.remainders[-1]
    changing = (step.action.removes for step in (*whole.prefix, *whole.suffix))
    # Without facts that hold and are never removed, the preconditions of long suffixes stay short.
    static = frozenset(problem.facts).difference(
        *changing, *(action.removes for action in grounded.actions)
    )
    suffixes: list[_SuffixTarget] = []
    for rest in problem.remainders:
        suffixes = list(_suffix_targets(problem, rest, static))
        targets = [Target(needs, removed) for removed, needs, _ in suffixes]
        start = _initial_facts(problem, rest)
        greedy = MAX_GREEDY_NODES if patient else 0
        result = search(start, targets, grounded.actions, nodes=nodes, greedy_nodes=greedy)
        results.append(result)
        if result.actions is not None:
            near.append(Repair("repair", rest, result.actions, rest.min_removed + result.target))
    certain = all(result.conclusive for result in results)
    if not certain and not patient:
        return Solution()
    if not near:
        return Solution(
            (), "proven-unreachable" if certain and grounded.complete else "not-found-within-bound"
        )
    repairs = [min(near, key=lambda repair: repair.distance)]
    others: list[SearchResult] = []
    start = _initial_facts(problem, whole)
    actions = grounded.actions
    if len({action.cost for action in actions}) > 1:
        targets = [Target(needs, cost) for _, needs, cost in suffixes]
        result = search(
            start, targets, actions, weight=lambda action: action.cost, nodes=nodes, greedy_nodes=0
        )
        others.append(result)
        if result.actions is not None:
            repairs.append(
                Repair("cheaper", whole, result.actions, whole.min_removed + result.target)
            )
    share = min(1.0, SCRATCH_ACTIONS / max(len(actions), 1))
    few = min(nodes, int(SCRATCH_NODES * share))
    greedy = int(SCRATCH_GREEDY_NODES * share)
    result = search(start, [Target(suffixes[-1][1], 0)], actions, nodes=few, greedy_nodes=greedy)
    others.append(result)
    if result.actions is not None:
        repairs.append(Repair("scratch", whole, result.actions, len(whole.removable)))
    if not patient and any(other.actions is None for other in others):
        return Solution()
    return Solution(tuple(_keep_repeated_steps(problem, repair) for repair in repairs))


def find_shortcuts(
    problem: RepairProblem,
    nodes: int = SCRATCH_NODES,
    check_cancelled: Callable[[], None] = lambda: None,
) -> Solution:
    """Return cheaper ways to the goal of a plan that can be executed: the cheapest, and the plan without superfluous steps.

    Args:
        problem: the problem; its last remainder is the plan.
        nodes: most states that are expanded, fewer with many actions. With at most
            `MAX_INLINE_NODES`, the search has no result if it uses them up.
        check_cancelled: called now and then; an exception of it ends the search.
    """
    patient = nodes > MAX_INLINE_NODES
    whole = problem.remainders[-1]
    prices = {tool.name: 1.0 if tool.cost is None else tool.cost for tool in problem.domain.tools}
    problem = replace(
        problem, costs={step.id: prices.get(step.tool or "", 0.0) for step in whole.suffix}
    )
    superfluous = _superfluous_steps(problem, whole)
    left_out = {step.id for step in superfluous}
    others = (step for step in whole.removable if step.id not in left_out)
    rest = whole._replace(removable=(*superfluous, *others), min_removed=len(superfluous))
    facts = dict.fromkeys(
        [*problem.facts, *(fact for step in rest.prefix for fact in sorted(step.action.adds))]
    )
    grounded = reachable_actions(
        tuple(facts), problem.domain, MAX_ACTIONS if patient else MAX_INLINE_ACTIONS
    )
    if not patient and (
        grounded.truncated or len(rest.removable) * len(rest.suffix) > MAX_INLINE_STEPS
    ):
        return Solution()
    suffixes = list(_suffix_targets(problem, rest, frozenset()))
    targets = [Target(needs, cost) for _, needs, cost in suffixes]
    result = find_cheapest_path(
        _initial_facts(problem, rest),
        targets,
        grounded.actions,
        weight=lambda action: prices[action.tool],
        nodes=int(
            nodes * min(1.0, SHORTCUT_CHOICES / max(len(grounded.actions) * len(targets), 1))
        ),
        greedy_nodes=0,
        check_cancelled=check_cancelled,
    )
    if not result.conclusive and not patient:
        return Solution()
    found = Repair("shortcut", rest, result.actions or (), len(superfluous) + max(result.target, 0))
    shortcuts = [
        _keep_repeated_steps(problem, found),
        Repair("superfluous", rest, (), len(superfluous)),
    ]
    cheaper = [
        shortcut
        for shortcut in shortcuts
        if sum(problem.costs[step.id] for step in shortcut.removed_steps)
        > sum(prices[action.tool] for action in shortcut.actions)
    ]
    return Solution(tuple(cheaper)) if cheaper else Solution((), "not-found-within-bound")


def _superfluous_steps(problem: RepairProblem, rest: PlanRemainder) -> tuple[StripsStep, ...]:
    """Return the removable steps whose effects are not needed later, or hold before them already.

    They are found backwards from the goal, as in the backward justification of Fink and Yang
    (1992), so that all of them can be left out together.
    """
    facts = set(_initial_facts(problem, rest))
    held: list[frozenset[str]] = []
    for step in rest.suffix:
        held.append(step.action.adds & facts)
        facts -= step.action.removes
        facts |= step.action.adds
    removable = {step.id for step in rest.removable}
    needed = set(problem.goal)
    superfluous: list[StripsStep] = []
    for step, before in zip(reversed(rest.suffix), reversed(held), strict=True):
        if step.id in removable and needed & step.action.adds <= before:
            superfluous.append(step)
        else:
            needed -= step.action.adds
            needed |= step.action.requires
    return tuple(reversed(superfluous))


def _keep_repeated_steps(problem: RepairProblem, repair: Repair) -> Repair:
    """Return the repair without the removal of steps that its bridge repeats.

    All of them are kept if they can precede the bridge, else those with which it begins.
    """
    repeated = Counter(action.key for action in repair.actions)
    same = [
        s
        for s in repair.removed_steps
        if s.startable and _take(repeated, action_key(s.tool, s.arguments))
    ]
    first: list[StripsStep] = []
    for step, action in zip(repair.removed_steps, repair.actions, strict=False):
        if not step.startable or action_key(step.tool, step.arguments) != action.key:
            break
        first.append(step)
    facts = _initial_facts(problem, repair.remainder)
    for steps in filter(None, (same, first)):
        kept = Counter(action_key(step.tool, step.arguments) for step in steps)
        actions = tuple(action for action in repair.actions if not _take(kept, action.key))
        kept_ids = {step.id for step in steps}
        remainder = PlanRemainder(
            (*repair.remainder.prefix, *steps),
            tuple(step for step in repair.remainder.suffix if step.id not in kept_ids),
            tuple(step for step in repair.remainder.removable if step.id not in kept_ids),
            0,
        )
        count = repair.removed_count - len(steps)
        shorter = repair._replace(remainder=remainder, actions=actions, removed_count=count)
        removed = {step.id for step in shorter.removed_steps}
        uses = [step.action for step in steps]
        uses += (
            GroundAction(frozenset(a.needs), frozenset(a.adds), frozenset(a.removes))
            for a in actions
        )
        uses += (step.action for step in remainder.suffix if step.id not in removed)
        needs = regress_at(problem.goal, uses)[0]
        later = {step.id for step in remainder.suffix}
        independent = all(later.isdisjoint(step.depends_on) for step in steps)
        if independent and needs is not None and needs <= facts:
            return shorter
    return repair


def _take(counts: Counter[str], key: str) -> bool:
    counts[key] -= 1
    return counts[key] >= 0


def _initial_facts(problem: RepairProblem, rest: PlanRemainder) -> frozenset[str]:
    facts = frozenset(problem.facts)
    for step in rest.prefix:
        facts = step.action.apply(facts)
    return facts


def _suffix_targets(
    problem: RepairProblem, rest: PlanRemainder, static: frozenset[str]
) -> Iterator[_SuffixTarget]:
    """Yield, by the number of removed steps, the facts that must hold before the kept steps, and their cost.

    The facts needed after the last removed step are computed once for all numbers.
    """
    place = {step.id: number for number, step in enumerate(rest.suffix)}
    loose = [place[step.id] for step in rest.removable]
    movable = set(loose)
    staying = [number for number in range(len(rest.suffix)) if number not in movable]
    last = list(accumulate(loose, max, initial=-1))
    tried = {
        *range(rest.min_removed, min(rest.min_removed + MAX_SUFFIX_TARGETS, len(loose)) + 1),
        len(loose),
    }
    uses = [step.action._replace(requires=step.action.requires - static) for step in rest.suffix]
    goal = frozenset(problem.goal) - static
    behind = regress_at(goal, uses, {last[removed] + 1 for removed in tried})
    cost = sum(problem.costs[step.id] for step in rest.suffix)
    cost -= sum(problem.costs[step.id] for step in rest.removable[: rest.min_removed])
    for removed in range(rest.min_removed, len(loose) + 1):
        after = behind[last[removed] + 1] if removed in tried else None
        if after is None:
            yield removed, None, cost
        else:
            before = sorted(
                number for number in (*staying, *loose[removed:]) if number < last[removed]
            )
            yield removed, regress_at(after, [uses[number] for number in before])[0], cost
        cost -= problem.costs[rest.removable[removed].id] if removed < len(loose) else 0.0
