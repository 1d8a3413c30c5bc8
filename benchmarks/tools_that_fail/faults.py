"""Faults of the shop's tools, and a conversation with one of them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from random import Random
from typing import Literal

from benchmarks.tools_that_fail.shop import (
    ERROR,
    MIRROR,
    READS,
    Conversation,
    Shop,
    Step,
    parsed,
)
from replanning.plan import JsonObject, JsonValue

Kind = Literal[
    "refused",
    "429",
    "slow",
    "lost acknowledgement",
    "error text",
    "empty",
    "truncated",
    "another record",
    "old value",
    "wrong amount",
]

SILENT: tuple[Kind, ...] = (
    "error text",
    "empty",
    "truncated",
    "another record",
    "old value",
    "wrong amount",
)
"""Faults with a wrong answer."""

MADE: tuple[Kind, ...] = ("slow", "lost acknowledgement", *SILENT[1:])
"""After these faults of a change, the change was made."""

SLOW_SECONDS = 60.0
"""What a slow call takes; callers wait for `TIMEOUT_SECONDS`."""

TIMEOUT_SECONDS = 10.0

Wait = Callable[[float], Awaitable[None]]
"""Waits for some seconds, or raises a `TimeoutError`, as a client does that has a time limit of its
own.
"""


class TooManyRequests(Exception):
    """A service has refused a call, as clients of HTTP say it."""

    status_code = 429


async def time_out(seconds: float) -> None:
    """Raise what a client raises whose time limit is up; nobody waits for it."""
    raise TimeoutError(f"no answer within {TIMEOUT_SECONDS:g} s")


@dataclass(frozen=True)
class Case:
    """A kind of fault, of a call that reads or of one that changes something.

    Each conversation is played with it once, at a call that the seed chooses.
    """

    kind: Kind
    changing: bool

    @property
    def group(self) -> str:
        """The group of faults that it is reported with."""
        calls = "changes" if self.changing else "reads"
        if self.kind in ("refused", "429"):
            return f"explicit, {calls}"
        if self.kind == "slow":
            return f"slow, {calls}"
        if self.kind == "lost acknowledgement":
            return LOST
        if not self.changing:
            return "silent, reads"
        if self.kind in MADE:
            return "silent, changes made"
        return "silent, changes not made"


LOST = "acknowledgement lost"


def cases() -> Iterator[Case]:
    """All kinds of faults."""
    for kind in ("refused", "429", "slow", *SILENT):
        yield Case(kind, changing=False)
    for kind in ("refused", "429", "slow", "lost acknowledgement", *SILENT):
        yield Case(kind, changing=True)


def needs_second_source(kind: Kind, step: Step) -> bool:
    """Return whether a wrong answer looks plausible.

    That is so of a value that could be right, and of another record if the answer does not name
    whose it is.
    """
    if kind == "wrong amount":
        return True
    if kind == "old value":
        return not step.changes
    if kind == "another record":
        return step.tool.startswith("find_user_id") or step.tool == "get_user_details"
    return False


@dataclass(frozen=True)
class Fault:
    """One fault of a conversation.

    Attributes:
        case: what kind of fault.
        step: the number of the call.
        executions: how many executions of the call fail; infinite if all do that follow of the
            tool.
    """

    case: Case
    step: int
    executions: float

    @property
    def passes(self) -> bool:
        """Whether the tool works again."""
        return not math.isinf(self.executions)


class Play:
    """One conversation that an agent has with the shop: the agent's script and the tools.

    The agent asks for its next call, has it executed in any way that it likes, and hears the
    answer, which it believes. Its state is the answers that it has heard, the database, and what
    has become of the fault.

    Args:
        shop: the shop.
        conversation: the conversation.
        fault: what is wrong in it; None for one that is not disturbed.
        chance: chooses wrong answers.

    Attributes:
        answers: what the agent has heard.
        wait: lets the time of a slow call pass; by default, the client's own time limit is up.
        executions: how often a tool was executed.
        noticed: whether somebody saw the fault for what it is: it was told to the agent as a
            failure, or its tool was executed again, or the engine has recorded a failure.
        sent_again: how often a change was asked for that had been made.
    """

    def __init__(
        self,
        shop: Shop,
        conversation: Conversation,
        fault: Fault | None,
        chance: Random,
    ) -> None:
        self.conversation = conversation
        self.answers: list[str] = []
        self.executions = 0
        self.noticed = False
        self.sent_again = 0
        self._shop = shop
        self._fault = fault
        self._chance = chance
        self.wait: Wait = time_out
        self._database = shop.database()
        self._expected = Counter(conversation.applied)
        self._left = 0.0
        if fault is not None:
            self._left = fault.executions
        self._executions_of_step = 0

    def __repr__(self) -> str:
        return f"<Play of conversation {self.conversation.number}, {len(self.answers)} answers>"

    @property
    def is_right(self) -> bool:
        """Whether the database is as after the reference calls."""
        return self._database.digest() == self.conversation.digest

    @property
    def applied_twice(self) -> int:
        """How many changes were made twice that the reference makes once."""
        made = Counter(self._database.applied)
        return sum(times > max(1, self._expected[call]) for call, times in made.items())

    @property
    def is_as_reference(self) -> bool:
        """Whether the agent heard, and the shop did, exactly what the reference says."""
        heard = [step.answer for step in self.conversation.steps]
        return (
            self.answers == heard
            and self.is_right
            and tuple(self._database.applied) == self.conversation.applied
        )

    def next_call(self) -> tuple[str, JsonObject] | None:
        """Return the tool and the arguments of the next call; None at the end.

        An agent that does not find in the answers what it needs ends the conversation as well.
        """
        number = len(self.answers)
        if number == len(self.conversation.steps):
            return None
        step = self.conversation.steps[number]
        try:
            return step.tool, step.arguments_from(self.answers)
        except (LookupError, TypeError):
            return None

    def hear(self, answer: str, *, failed: bool = False) -> None:
        """Take the answer to the last call; `failed` if the agent was told that it is none."""
        if failed:
            self.notice()
        self.answers.append(answer)
        self._executions_of_step = 0

    def notice(self) -> None:
        """Note that the call which is made now was seen to have failed."""
        if self._is_fault_of_step():
            self.noticed = True

    async def execute(self, name: str, arguments: Mapping[str, object]) -> str:
        """Execute a tool or its mirror, with the fault if it is the one that fails."""
        self.executions += 1
        tool = name.removesuffix(MIRROR)
        if name == tool:
            self._executions_of_step += 1
        # A mirror may be asked without a suspicion, so that alone shows none.
        if self._executions_of_step > 1:
            self.notice()
        call = json.dumps([tool, arguments])
        if tool not in READS:
            made = Counter(self._database.applied)[call]
            self.sent_again += made > 0 and made >= self._expected[call]
        fault = self._fault
        if fault is None or name != tool or not self._is_hit(tool):
            return self._database.call(tool, arguments)
        self._left -= 1
        kind = fault.case.kind
        if kind == "refused":
            raise ConnectionRefusedError("the connection was refused")
        if kind == "429":
            raise TooManyRequests("429 Too Many Requests")
        if fault.case.changing and kind not in MADE:
            return self._chance.choice(_REFUSALS)
        before = self._database.record(arguments)
        answer = self._database.call(tool, arguments)
        if kind == "lost acknowledgement":
            raise ConnectionResetError("the connection was reset")
        if kind == "slow":
            await self.wait(SLOW_SECONDS)
            return answer
        if fault.case.changing and kind == "old value":
            return before
        wrong = wrong_answer(self._shop, kind, tool, answer, self._chance)
        if wrong is None:
            return answer
        return wrong

    def _is_fault_of_step(self) -> bool:
        return self._fault is not None and len(self.answers) == self._fault.step

    def _is_hit(self, tool: str) -> bool:
        fault = self._fault
        if fault is None or self._left <= 0:
            return False
        if not fault.passes:
            failing = self.conversation.steps[fault.step].tool
            return tool == failing and len(self.answers) >= fault.step
        return self._is_fault_of_step()


def draw(shop: Shop, conversation: Conversation, case: Case, seed: int) -> Fault | None:
    """Return a fault of a conversation, at one of the calls that can have it; None without one.

    It passes after one or two executions, or, of half the reads, never. A change has no second tool
    that could make it.
    """
    chance = Random(f"{seed}/{conversation.number}/{case}")
    able = [
        number
        for number, step in enumerate(conversation.steps)
        if _can_have(shop, case, step, chance)
    ]
    if not able:
        return None
    executions: float = chance.choice((1, 2))
    if not case.changing and chance.random() < 0.5:
        executions = math.inf
    return Fault(case, chance.choice(able), executions)


def _can_have(shop: Shop, case: Case, step: Step, chance: Random) -> bool:
    if case.changing:
        if not step.changes:
            return False
    elif step.tool not in READS:
        return False
    if case.kind not in SILENT or (case.changing and case.kind in ("error text", "old value")):
        return True
    # What answers an error by itself cannot be told from a tool that fails.
    if step.answer.startswith(ERROR):
        return False
    return wrong_answer(shop, case.kind, step.tool, step.answer, chance) is not None


_REFUSALS = (
    "Error: the service is temporarily unavailable",
    "Error: internal error, please try again later",
    "Error: upstream request timed out, nothing was done",
)

_FOREIGN_ERRORS = (
    '{"error": {"code": 503, "message": "overloaded"}}',
    "<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>",
    "Internal Server Error",
)
"""Errors in other words than the shop's, of what stands between a tool and its caller."""

_EARLIER_STATUS = {
    "processed": "pending",
    "delivered": "processed",
    "cancelled": "pending",
    "return requested": "delivered",
    "exchange requested": "delivered",
    "pending (item modified)": "pending",
}


def wrong_answer(shop: Shop, kind: Kind, tool: str, answer: str, chance: Random) -> str | None:
    """Return a wrong answer in place of a right one; None if there is none of this kind."""
    value = parsed(answer)
    if kind == "error text":
        return chance.choice((*_REFUSALS, *_FOREIGN_ERRORS))
    if kind == "empty":
        if isinstance(value, str):
            return ""
        return chance.choice(("", "{}", "[]", "null"))
    if kind == "truncated":
        if isinstance(value, str):
            return None
        return answer[: int(len(answer) * chance.uniform(0.1, 0.9))]
    if kind == "another record":
        return _another_record(shop, tool, value, chance)
    if not isinstance(value, dict):
        if kind == "wrong amount" and tool == "calculate":
            return str(round(float(answer) * chance.uniform(1.1, 3.0), 2))
        return None
    if kind == "old value":
        return _old_value(value)
    amounts = list(_amounts(value))
    if not amounts:
        return None
    owner, key, amount = chance.choice(amounts)
    owner[key] = round(amount * chance.uniform(1.1, 3.0), 2)
    return json.dumps(value)


def _another_record(shop: Shop, tool: str, value: JsonValue, chance: Random) -> str | None:
    """Return the answer about another user, order or product."""
    database = shop.database()
    if tool.startswith("find_user_id"):
        others = [key for key in shop.records("users") if key != value]
        return chance.choice(others)
    if not isinstance(value, dict):
        return None
    if "order_id" in value:
        others = [key for key in shop.records("orders") if key != value["order_id"]]
        return database.call("get_order_details", {"order_id": chance.choice(others)})
    if "product_id" in value:
        others = [key for key in shop.records("products") if key != value["product_id"]]
        return database.call("get_product_details", {"product_id": chance.choice(others)})
    if "email" in value:
        others = shop.records("users")
        answer = database.call("get_user_details", {"user_id": chance.choice(others)})
        if json.loads(answer)["email"] == value["email"]:
            return None
        return answer
    return None


def _old_value(value: JsonObject) -> str | None:
    """Return a record as it was earlier: an order before its last step, a user before the last order."""
    status = value.get("status")
    if isinstance(status, str):
        if status not in _EARLIER_STATUS:
            return None
        value["status"] = _EARLIER_STATUS[status]
        return json.dumps(value)
    orders = value.get("orders")
    if isinstance(orders, list) and orders:
        orders.pop()
        return json.dumps(value)
    variants = value.get("variants")
    if isinstance(variants, dict):
        for variant in variants.values():
            if isinstance(variant, dict):
                variant["available"] = not variant["available"]
        return json.dumps(value)
    return None


def _amounts(value: JsonValue) -> Iterator[tuple[JsonObject, str, float]]:
    """Yield where a value has amounts of money other than none: the object, its key, and the amount."""
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, (int, float)) and not isinstance(item, bool) and item:
                yield value, key, item
            yield from _amounts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _amounts(item)


playing: ContextVar[Play] = ContextVar("playing")
"""The conversation that the tools of a framework's agent belong to."""
