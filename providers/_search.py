"""Finds the way with the fewest changes from what holds now back into a plan.

A* (Hart, Nilsson and Raphael 1968) over sets of facts, towards several targets at once, each with the price of
what it leaves out of the plan; its heuristic counts the facts that a target lacks, divided by the most that one
action adds, and never says too much. Where that takes too long, greedy best-first search with the additive
heuristic (Bonet and Geffner 2001) takes over, whose way may be longer. Both are bounded in nodes, never by the
clock, and go by the order in which things are stated.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from replanning.providers._grounding import ToolAction

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
