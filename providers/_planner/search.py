"""Search for the bridge with the fewest changes from the current facts back into a plan.

A* (Hart, Nilsson and Raphael 1968) searches sets of facts for several targets at once, each with
the cost of the steps that it leaves out. Its heuristic, the number of facts that a target lacks
divided by the most that one action adds, is admissible. If A* takes too long, greedy best-first
search with the additive heuristic (Bonet and Geffner 2001) takes over; its result may not be
optimal. Both are bounded by nodes, never by the clock, and depend on the order of the tools and
facts in the plan.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Final, Literal, NamedTuple, TypeAlias

from replanning.live import GroundAction, StripsStep
from replanning.live.strips import regress_at
from replanning.plan.types import TaskId
from replanning.providers._planner.domain import (
    MAX_ACTIONS,
    Domain,
    Grounding,
    ToolAction,
    action_key,
    reachable_actions,
)

MAX_ASTAR_NODES: Final = 20_000
"""Maximum number of states that A* expands."""

MAX_GREEDY_NODES: Final = 3_000
"""Maximum number of states that greedy search expands."""

NODES_PER_CANCEL_CHECK: Final = 50
"""Number of states that are expanded between two cancellation checks."""

_INFINITY: Final = 1 << 40


class Target(NamedTuple):
    """Target of a search: the facts that must hold, and the cost of the steps it leaves out.

    A target whose facts are None is unreachable.
    """

    needs: frozenset[str] | None
    cost: float


class SearchResult(NamedTuple):
    """Actions that lead to one of the targets, or None.

    The result is `conclusive` if no better one exists.
    """

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
    """Search space in which each fact is one bit of a state.

    Attributes:
        start: the initial state.
        moves: the actions.
        goals: the facts, the cost and the number of each target.
        min_weight: the lowest cost of an action.
        max_adds: the largest number of facts that one action adds.
    """

    start: int
    moves: tuple[_Move, ...]
    goals: tuple[tuple[int, float, int], ...]
    min_weight: float
    max_adds: int

    def heuristic(self, state: int) -> float:
        """Return a lower bound of the cost from a state to a target."""
        least = math.inf
        for needs, cost, _ in self.goals:
            steps = math.ceil((needs & ~state).bit_count() / self.max_adds)
            least = min(least, cost + steps * self.min_weight)
        return least

    def successors(self, state: int) -> Iterator[tuple[int, float, ToolAction]]:
        """Yield the states that one action leads to, with its weight."""
        for needs, adds, removes, weight, action in self.moves:
            if not needs & ~state:
                yield (state & ~removes) | adds, weight, action

    def satisfied_target(self, state: int) -> tuple[float, int] | None:
        """Return the cost and number of the cheapest target that a state satisfies."""
        cheapest: tuple[float, int] | None = None
        for needs, cost, number in self.goals:
            if needs & ~state:
                continue
            if cheapest is None or cost < cheapest[0]:
                cheapest = (cost, number)
        return cheapest


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
        targets: the targets; the first of equally cheap ones wins.
        actions: actions that can be used.
        weight: cost of an action.
        nodes: maximum number of states that A* expands.
        greedy_nodes: maximum number of states that greedy search expands, if A* finds no result
            within its bound.
        check_cancelled: called regularly; an exception ends the search.
    """
    holds = frozenset(start)
    actions = _contributing_actions(holds, targets, actions)
    # Targets that the delete relaxation does not reach are left out.
    within_reach = set(holds)
    bits: dict[str, int] = {}
    for action in actions:
        within_reach.update(action.adds)
        for fact in (*action.adds, *action.removes):
            bits.setdefault(fact, 1 << len(bits))
    goals: list[tuple[int, float, int]] = []
    for number, (needs, cost) in enumerate(targets):
        if needs is not None and needs <= within_reach:
            goals.append((_mask(needs, bits), cost, number))
    if not goals:
        return SearchResult(None, -1, True, 0)
    moves: list[_Move] = []
    max_adds = 1
    for action in actions:
        if within_reach.issuperset(action.needs):
            needed = _mask(action.needs, bits)
            added = _mask(action.adds, bits)
            removed = _mask(action.removes, bits)
            moves.append(_Move(needed, added, removed, weight(action), action))
            max_adds = max(max_adds, added.bit_count())
    least = min((move.weight for move in moves), default=0)
    space = _SearchSpace(_mask(holds, bits), tuple(moves), tuple(goals), least, max_adds)
    result = _a_star(space, nodes, check_cancelled)
    if result.actions is None and not result.conclusive and greedy_nodes:
        return _greedy_search(space, greedy_nodes, check_cancelled)
    return result


def _contributing_actions(
    holds: frozenset[str], targets: Sequence[Target], actions: Sequence[ToolAction]
) -> list[ToolAction]:
    """Return the actions that add facts that are missing, or will be after other such actions.

    All others can be omitted from any plan.
    """
    adding: dict[str, list[int]] = {}
    for number, action in enumerate(actions):
        for fact in action.adds:
            adding.setdefault(fact, []).append(number)
    needed: set[str] = set()
    for needs, _ in targets:
        needed.update(needs or ())
    removed: set[str] = set()
    lacking = list(needed - holds)
    seen = set(lacking)
    chosen: set[int] = set()
    while lacking:
        for number in adding.get(lacking.pop(), ()):
            if number in chosen:
                continue
            chosen.add(number)
            action = actions[number]
            needed.update(action.needs)
            removed.update(action.removes)
            for fact in (*action.needs, *action.removes):
                if fact in seen or fact not in needed:
                    continue
                if fact in removed or fact not in holds:
                    seen.add(fact)
                    lacking.append(fact)
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
    """Return the additive heuristic: the sum of the costs of a target's facts.

    Each cost is computed as if its fact were the only one.
    """
    goals: list[tuple[list[int], float]] = []
    largest = space.start
    for needs, cost, _ in space.goals:
        goals.append((list(_bits(needs)), cost))
        largest |= needs
    for move in space.moves:
        largest |= move.adds | move.removes | move.needs
    size = largest.bit_length()
    # By fact, the actions that need it; by action, the number of facts that it needs.
    users: list[list[int]] = [[] for _ in range(size)]
    counts: list[int] = []
    moves: list[tuple[list[int], float]] = []
    # Facts added by actions without preconditions.
    free: list[tuple[float, int]] = []
    for number, move in enumerate(space.moves):
        needed = list(_bits(move.needs))
        added = list(_bits(move.adds))
        counts.append(len(needed))
        moves.append((added, move.weight))
        for fact in needed:
            users[fact].append(number)
        if not needed:
            for fact in added:
                free.append((move.weight, fact))

    def distance(state: int) -> float:
        costs: list[float] = [_INFINITY] * size
        left = counts.copy()
        sums = [0.0] * len(left)
        queue = [(0.0, fact) for fact in _bits(state) if fact < size]
        queue += free
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
                    adds, weight = moves[number]
                    for added in adds:
                        if sums[number] + weight < costs[added]:
                            heapq.heappush(queue, (sums[number] + weight, added))
        least = float(_INFINITY)
        for facts, target_cost in goals:
            least = min(least, target_cost + sum(costs[fact] for fact in facts))
        return least

    return distance


def _bits(mask: int) -> Iterator[int]:
    number = 0
    while mask:
        low = (mask & -mask).bit_length()
        number += low
        yield number - 1
        mask >>= low


MAX_INLINE_NODES: Final = 300
"""Maximum number of states expanded on the event loop; longer searches run in a thread."""

MAX_INLINE_ACTIONS: Final = 100
"""Maximum number of actions of a search on the event loop."""

MAX_INLINE_STEPS: Final = 1_000
"""Maximum product of suffixes and steps of a search on the event loop."""

MAX_SUFFIX_TARGETS: Final = 200
"""Maximum number of suffixes of the plan that are targets, besides the goal."""

SCRATCH_NODES: Final = 2_000
SCRATCH_GREEDY_NODES: Final = 50
SCRATCH_ACTIONS: Final = 1_000
"""Bounds of the search for a plan from scratch, which is only an additional choice.

With more actions, the bounds of nodes shrink in proportion, because each state tries each action.
"""

SHORTCUT_CHOICES: Final = 100
"""Product of actions and suffixes above which the search for a cheaper plan is cut short."""

_SuffixTarget: TypeAlias = tuple[int, frozenset[str] | None, float]


class PlanRemainder(NamedTuple):
    """Remaining steps of a plan, divided at the place of the bridge.

    Attributes:
        prefix: steps that are kept before the bridge.
        suffix: all steps after it, in order.
        removable: those steps of the suffix that may be removed, the first ones first.
        min_removed: minimum number of removable steps that must be removed.
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
        costs: costs of the steps, by id.
        stuck: steps that cannot be executed.
    """

    facts: tuple[str, ...]
    goal: tuple[str, ...]
    domain: Domain
    remainders: tuple[PlanRemainder, ...]
    costs: Mapping[str, float]
    stuck: tuple[StripsStep, ...]


class Repair(NamedTuple):
    """Solution: a bridge, its place, and the number of removable steps that it removes."""

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
        """Number of actions added and removed.

        An action that is removed and added again counts as neither.
        """
        removed = Counter(map(_step_key, self.removed_steps))
        added = _count_calls(self.actions)
        return removed.total() + added.total() - 2 * (removed & added).total()


class Solution(NamedTuple):
    """Repairs, the nearest first, or the verdict.

    It has neither if the bound was too small for a verdict.
    """

    repairs: tuple[Repair, ...] = ()
    unreachable: Literal["proven-unreachable", "not-found-within-bound"] | None = None


def solve(
    problem: RepairProblem,
    nodes: int = MAX_ASTAR_NODES,
    check_cancelled: Callable[[], None] = lambda: None,
) -> Solution:
    """Return repairs of one part of a plan: the nearest, the cheapest, and one from scratch.

    Args:
        problem: the problem.
        nodes: maximum number of states that each search expands; with less than `MAX_ASTAR_NODES`,
            a search that uses them up gives no verdict.
        check_cancelled: called regularly; an exception ends the search.
    """
    patient = nodes >= MAX_ASTAR_NODES
    search = partial(find_cheapest_path, nodes=nodes, check_cancelled=check_cancelled)
    grounded = _ground(problem, patient=patient)
    if grounded is None:
        return Solution()
    actions = grounded.actions
    static = _static_facts(problem, actions)
    whole = problem.remainders[-1]
    near: list[Repair] = []
    certain = True
    suffixes: list[_SuffixTarget] = []
    for rest in problem.remainders:
        suffixes = list(_suffix_targets(problem, rest, static))
        targets = [Target(needs, removed) for removed, needs, _ in suffixes]
        start = _initial_facts(problem, rest)
        greedy = MAX_GREEDY_NODES if patient else 0
        result = search(start, targets, actions, greedy_nodes=greedy)
        certain = certain and result.conclusive
        if result.actions is not None:
            near.append(Repair("repair", rest, result.actions, rest.min_removed + result.target))
    if not certain and not patient:
        return Solution()
    if not near:
        if certain and grounded.complete:
            return Solution((), "proven-unreachable")
        return Solution((), "not-found-within-bound")

    repairs = [min(near, key=lambda repair: repair.distance)]
    start = _initial_facts(problem, whole)
    if len({action.cost for action in actions}) > 1:
        targets = [Target(needs, cost) for _, needs, cost in suffixes]
        result = search(start, targets, actions, weight=lambda action: action.cost, greedy_nodes=0)
        if result.actions is not None:
            count = whole.min_removed + result.target
            repairs.append(Repair("cheaper", whole, result.actions, count))
        elif not patient:
            return Solution()
    share = min(1.0, SCRATCH_ACTIONS / max(len(actions), 1))
    few = min(nodes, int(SCRATCH_NODES * share))
    greedy = int(SCRATCH_GREEDY_NODES * share)
    result = search(start, [Target(suffixes[-1][1], 0)], actions, nodes=few, greedy_nodes=greedy)
    if result.actions is not None:
        repairs.append(Repair("scratch", whole, result.actions, len(whole.removable)))
    elif not patient:
        return Solution()
    return Solution(tuple(_keep_repeated_steps(problem, repair) for repair in repairs))


def _ground(problem: RepairProblem, *, patient: bool) -> Grounding | None:
    """Return the actions that can become possible; None if too many for the event loop."""
    limit = MAX_ACTIONS
    if not patient:
        limit = MAX_INLINE_ACTIONS
        for rest in problem.remainders:
            if len(rest.removable) * len(rest.suffix) > MAX_INLINE_STEPS:
                return None
    facts = dict.fromkeys(problem.facts)
    for step in problem.remainders[0].prefix:
        facts |= ordered(step.action, step.action.adds)
    grounded = reachable_actions(tuple(facts), problem.domain, limit)
    if grounded.truncated and not patient:
        return None
    return grounded


def _static_facts(problem: RepairProblem, actions: Iterable[ToolAction]) -> frozenset[str]:
    """Return the facts that hold and are never removed.

    Without them, the preconditions of long suffixes stay short.
    """
    whole = problem.remainders[-1]
    static = set(problem.facts)
    for step in (*whole.prefix, *whole.suffix):
        static -= step.action.removes
    for action in actions:
        static.difference_update(action.removes)
    return frozenset(static)


def find_shortcuts(
    problem: RepairProblem,
    nodes: int = SCRATCH_NODES,
    check_cancelled: Callable[[], None] = lambda: None,
) -> Solution:
    """Return cheaper ways to the goal of a plan that can be executed.

    They are the cheapest one, and the plan without superfluous steps.

    Args:
        problem: the problem; its last remainder is the plan.
        nodes: maximum number of states that are expanded, lower with many actions. With at most
            `MAX_INLINE_NODES`, the search has no result if it uses them up.
        check_cancelled: called regularly; an exception ends the search.
    """
    patient = nodes > MAX_INLINE_NODES
    whole = problem.remainders[-1]
    prices: dict[str, float] = {}
    for tool in problem.domain.tools:
        prices[tool.name] = 1.0 if tool.cost is None else tool.cost
    costs: dict[str, float] = {}
    for step in whole.suffix:
        costs[step.id] = prices.get(step.tool or "", 0.0)
    superfluous = _superfluous_steps(problem, whole)
    others = without(whole.removable, step_ids(superfluous))
    rest = whole._replace(removable=(*superfluous, *others), min_removed=len(superfluous))
    problem = replace(problem, costs=costs, remainders=(rest,))
    grounded = _ground(problem, patient=patient)
    if grounded is None:
        return Solution()
    targets = [
        Target(needs, cost) for _, needs, cost in _suffix_targets(problem, rest, frozenset())
    ]
    choices = max(len(grounded.actions) * len(targets), 1)
    result = find_cheapest_path(
        _initial_facts(problem, rest),
        targets,
        grounded.actions,
        weight=lambda action: prices[action.tool],
        nodes=int(nodes * min(1.0, SHORTCUT_CHOICES / choices)),
        greedy_nodes=0,
        check_cancelled=check_cancelled,
    )
    if not result.conclusive and not patient:
        return Solution()
    found = Repair("shortcut", rest, result.actions or (), len(superfluous) + max(result.target, 0))
    cheaper: list[Repair] = []
    for shortcut in (
        _keep_repeated_steps(problem, found),
        Repair("superfluous", rest, (), len(superfluous)),
    ):
        saved = sum(costs[step.id] for step in shortcut.removed_steps)
        if saved > sum(prices[action.tool] for action in shortcut.actions):
            cheaper.append(shortcut)
    if not cheaper:
        return Solution((), "not-found-within-bound")
    return Solution(tuple(cheaper))


def _superfluous_steps(problem: RepairProblem, rest: PlanRemainder) -> tuple[StripsStep, ...]:
    """Return the removable steps whose effects are not needed later, or already hold before them.

    The search goes backwards from the goal, as in the backward justification of Fink and Yang
    (1992), so that all of them can be left out together.
    """
    facts = set(_initial_facts(problem, rest))
    held: list[frozenset[str]] = []
    for step in rest.suffix:
        held.append(step.action.adds & facts)
        facts -= step.action.removes
        facts |= step.action.adds
    removable = step_ids(rest.removable)
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

    All of them are kept if they can precede the bridge, else those that it begins with.
    """
    repeated = _count_calls(repair.actions)
    same: list[StripsStep] = []
    for step in repair.removed_steps:
        if step.startable and _take(repeated, _step_key(step)):
            same.append(step)
    first: list[StripsStep] = []
    for step, action in zip(repair.removed_steps, repair.actions, strict=False):
        if not step.startable or _step_key(step) != action.key:
            break
        first.append(step)
    facts = _initial_facts(problem, repair.remainder)
    for steps in filter(None, (same, first)):
        shorter = _keep_steps(repair, steps)
        if _reaches_goal(shorter, steps, facts, problem.goal):
            return shorter
    return repair


def _keep_steps(repair: Repair, steps: Sequence[StripsStep]) -> Repair:
    """Return the repair with removed steps before its bridge, which does not repeat them."""
    kept = Counter(map(_step_key, steps))
    actions = tuple(action for action in repair.actions if not _take(kept, action.key))
    kept_ids = step_ids(steps)
    rest = repair.remainder
    remainder = PlanRemainder(
        (*rest.prefix, *steps),
        without(rest.suffix, kept_ids),
        without(rest.removable, kept_ids),
        0,
    )
    count = repair.removed_count - len(steps)
    return repair._replace(remainder=remainder, actions=actions, removed_count=count)


def _reaches_goal(
    repair: Repair, steps: Sequence[StripsStep], facts: frozenset[str], goal: Iterable[str]
) -> bool:
    """Return whether a repair reaches a goal after some steps, which must wait for no later one."""
    later = step_ids(repair.remainder.suffix)
    uses: list[GroundAction] = []
    for step in steps:
        if not later.isdisjoint(step.depends_on):
            return False
        uses.append(step.action)
    for action in repair.actions:
        uses.append(joint_action([action]))
    for step in without(repair.remainder.suffix, step_ids(repair.removed_steps)):
        uses.append(step.action)
    needs = regress_at(goal, uses)[0]
    return needs is not None and needs <= facts


def joint_action(actions: Iterable[ToolAction]) -> GroundAction:
    """Return one action with all preconditions and effects of some actions."""
    needs: set[str] = set()
    adds: set[str] = set()
    removes: set[str] = set()
    for action in actions:
        needs.update(action.needs)
        adds.update(action.adds)
        removes.update(action.removes)
    return GroundAction(frozenset(needs), frozenset(adds), frozenset(removes))


def step_ids(steps: Iterable[StripsStep]) -> set[TaskId]:
    """Return the ids of steps."""
    return {step.id for step in steps}


def without(steps: Iterable[StripsStep], ids: Collection[TaskId]) -> tuple[StripsStep, ...]:
    """Return the other steps, in their order."""
    return tuple(step for step in steps if step.id not in ids)


def ordered(action: GroundAction, facts: AbstractSet[str]) -> dict[str, None]:
    """Return the given facts that an action states, in the order of its tool.

    The order of a set differs from one process to the next.
    """
    return {fact: None for fact in action.facts if fact in facts}


def _step_key(step: StripsStep) -> str:
    return action_key(step.tool, step.arguments)


def _count_calls(actions: Iterable[ToolAction]) -> Counter[str]:
    return Counter(action.key for action in actions)


def _take(counts: Counter[str], key: str) -> bool:
    """Take one from a count; return whether there was one."""
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
    """Yield the targets by the number of removed steps.

    Each has that number, the facts that must hold before the kept steps, and their cost. The facts
    needed after the last removed step are computed once for all numbers.
    """
    place = {step.id: number for number, step in enumerate(rest.suffix)}
    loose = [place[step.id] for step in rest.removable]
    staying = sorted(set(place.values()).difference(loose))
    last = list(accumulate(loose, max, initial=-1))
    most = min(rest.min_removed + MAX_SUFFIX_TARGETS, len(loose))
    tried = {*range(rest.min_removed, most + 1), len(loose)}
    uses: list[GroundAction] = []
    for step in rest.suffix:
        uses.append(step.action._replace(requires=step.action.requires - static))
    goal = frozenset(problem.goal) - static
    behind = regress_at(goal, uses, {last[removed] + 1 for removed in tried})
    cost = sum(problem.costs[step.id] for step in rest.suffix)
    cost -= sum(problem.costs[step.id] for step in rest.removable[: rest.min_removed])
    for removed in range(rest.min_removed, len(loose) + 1):
        needs: frozenset[str] | None = None
        if removed in tried:
            needs = behind[last[removed] + 1]
        if needs is not None:
            before: list[GroundAction] = []
            for number in sorted((*staying, *loose[removed:])):
                if number < last[removed]:
                    before.append(uses[number])
            needs = regress_at(needs, before)[0]
        yield removed, needs, cost
        if removed < len(loose):
            cost -= problem.costs[rest.removable[removed].id]
