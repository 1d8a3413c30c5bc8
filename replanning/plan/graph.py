"""Algorithms on a dependency graph with numbered nodes: `dependencies[i]` are the nodes that i depends on.

No function recurses or is quadratic in the number of nodes, so plans of any size and shape can be checked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

Graph = Sequence[Sequence[int]]
_TARGETS_PER_PASS: Final = 4096
"""Targets answered for in one pass: one bit each per node, so half a KiB per node."""


def reverse_graph(dependencies: Graph) -> list[list[int]]:
    """Return for each node the nodes that depend on it."""
    dependents: list[list[int]] = [[] for _ in dependencies]
    for node, needed in enumerate(dependencies):
        for before in needed:
            dependents[before].append(node)
    return dependents


def topological_order(dependencies: Graph) -> list[int]:
    """Return the nodes, each after its dependencies, without those on a cycle or behind one."""
    dependents = reverse_graph(dependencies)
    missing = [len(needed) for needed in dependencies]
    order = [node for node, count in enumerate(missing) if not count]
    for node in order:  # grows while it is walked
        for after in dependents[node]:
            missing[after] -= 1
            if not missing[after]:
                order.append(after)
    return order


def find_cycles(dependencies: Graph) -> list[list[int]]:
    """Return one cycle for each set of nodes that depend on one another: n0 depends on n1 … depends on n0."""
    core = set(range(len(dependencies))).difference(topological_order(dependencies))
    if not core:
        return []
    inner = [[node for node in needed if node in core] if i in core else [] for i, needed in enumerate(dependencies)]
    found = [
        _shortest_cycle(inner, set(component)) for component in _strongly_connected_components(inner, sorted(core))
    ]
    return sorted(cycle for cycle in found if cycle)


def unreachable_pairs(dependencies: Graph, queries: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return the pairs (node, target) of `queries` in which the node depends on the target neither directly nor indirectly.

    The graph must have no cycle.
    """
    wanted: dict[int, list[int]] = {}
    for node, target in queries:
        if target not in dependencies[node]:
            wanted.setdefault(target, []).append(node)
    if not wanted:
        return set()
    order = topological_order(dependencies)
    position = {node: place for place, node in enumerate(order)}
    targets = sorted(wanted, key=position.__getitem__)
    found: set[tuple[int, int]] = set()
    for first in range(0, len(targets), _TARGETS_PER_PASS):
        batch = targets[first : first + _TARGETS_PER_PASS]
        last = max(position[node] for target in batch for node in wanted[target])
        ancestors = _ancestors(dependencies, order[position[batch[0]] : last + 1], batch)
        for bit, target in enumerate(batch):
            found.update((node, target) for node in wanted[target] if not ancestors.get(node, 0) >> bit & 1)
    return found


def _ancestors(dependencies: Graph, order: Iterable[int], targets: Sequence[int]) -> dict[int, int]:
    """Return for each node of `order` a bit for each target that it depends on, directly or indirectly."""
    own = {target: 1 << bit for bit, target in enumerate(targets)}
    ancestors: dict[int, int] = {}
    for node in order:
        bits = 0
        for before in dependencies[node]:
            bits |= ancestors.get(before, 0) | own.get(before, 0)
        if bits:
            ancestors[node] = bits
    return ancestors


def _strongly_connected_components(dependencies: Graph, nodes: Iterable[int]) -> Iterator[list[int]]:
    dependents = reverse_graph(dependencies)
    seen: set[int] = set()
    for root in reversed(_post_order(dependencies, nodes)):
        if root in seen:
            continue
        seen.add(root)
        component = [root]
        for node in component:  # grows while it is walked
            fresh = [after for after in dependents[node] if after not in seen]
            seen.update(fresh)
            component.extend(fresh)
        yield component


def _post_order(dependencies: Graph, nodes: Iterable[int]) -> list[int]:
    """Return the nodes in the order in which a depth-first search leaves them."""
    seen: set[int] = set()
    order = []
    for root in nodes:
        walk = [] if root in seen else [(root, iter(dependencies[root]))]
        seen.add(root)
        while walk:
            node, rest = walk[-1]
            before = next((before for before in rest if before not in seen), None)
            if before is None:
                order.append(node)
                walk.pop()
            else:
                seen.add(before)
                walk.append((before, iter(dependencies[before])))
    return order


def _shortest_cycle(dependencies: Graph, component: set[int]) -> list[int]:
    """Return the shortest cycle through the first node of a component; [] if there is none."""
    start = min(component)
    came_from: dict[int, int] = {}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        for before in dependencies[node]:
            if before == start:
                path = [node]
                while path[-1] != start:
                    path.append(came_from[path[-1]])
                return path[::-1]
            if before in component and before not in came_from:
                came_from[before] = node
                queue.append(before)
    return []
