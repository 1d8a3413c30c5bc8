"""Functions as tools: how they are described, called by name, refused, and given JSON."""

import functools
import inspect
import re
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from replanning import Plan, Task, TaskContext, ToolSpec, tool
from replanning.engine.functions import FunctionTool
from replanning.errors import PlanError
from replanning.plan import JsonObject
from tests.support.runs import make_engine, plan


class Point(BaseModel):
    """A value with a model."""

    x: int


class Shop:
    """Tools that are no plain functions."""

    def method(self, a: int, b: str = "x") -> str:
        """Join."""
        return f"{a}{b}"

    async def __call__(self, a: int) -> int:
        return a


def context_first(context: TaskContext, a: int, /, b: int | str = 2) -> tuple[bool, int, object]:
    """Take the context before the arguments."""
    return bool(context.attempt_id), a, b


def any_number(a: int, *more: int, **options: int) -> object:
    """Take any further arguments."""
    return a, more, options


def forward(a: "Nowhere", *, b: int = 1) -> object:  # type: ignore[name-defined]  # noqa: F821
    """Name a type that does not exist."""
    return a, b


def anything(**options: object) -> object:
    """Take any names."""
    return options


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "result"),
    [
        (Shop().method, (1,), {"b": "y"}, "1y"),
        (Shop(), (1,), {}, 1),
        (functools.partial(Shop().method, 1), (), {"b": "z"}, "1z"),
        (context_first, (1,), {"b": 3}, (True, 1, 3)),
        (forward, (1,), {"b": 2}, (1, 2)),
        (
            anything,
            (),
            {"self": 1, "arguments": 2, "a b": 3},
            {"self": 1, "arguments": 2, "a b": 3},
        ),
        (len, ([1, 2],), {}, 2),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__) if callable(value) else "",
)
async def test_any_signature(clock, function, args, kwargs, result):
    """A function of any kind is called as it would be without a session."""
    async with make_engine(clock=clock).session("call") as session:
        assert await session.call(function, *args, **kwargs) == result
        assert repr(session.run) in repr(session)
        assert repr(function) in repr(session._tools.of(function))


@pytest.mark.parametrize("function", [Shop().method, context_first, forward, anything, any_number])
@pytest.mark.parametrize("args", [(), (1,), (1, 2), (1, 2, 3)])
@pytest.mark.parametrize("kwargs", [{}, {"a": 3}, {"b": 4}, {"b": 4, "c": 5}, {"context": 6}])
def test_arguments_by_name(function, args, kwargs):
    """The arguments of a call get the names that Python gives them, and what Python refuses is a TypeError."""
    made = FunctionTool(function)
    signature = inspect.signature(function)
    known = [
        each
        for name, each in signature.parameters.items()
        if name != "context" or function is not context_first
    ]
    try:
        bound = signature.replace(parameters=known).bind(*args, **kwargs).arguments
    except TypeError as error:
        with pytest.raises(TypeError, match=re.escape(str(error))):
            made.bind(args, kwargs)
        return
    if bound.pop("more", ()):
        with pytest.raises(TypeError, match="any number of positional"):
            made.bind(args, kwargs)
    else:
        assert made.bind(args, kwargs) == bound.pop("options", {}) | bound


async def test_what_is_no_tool(clock):
    """What cannot be called by the names of its arguments is refused, as are two tools of one name."""
    with pytest.raises(TypeError, match="are not known"):
        tool(max)
    with pytest.raises(TypeError, match="any number of positional"):
        FunctionTool(print).bind((1,), {})
    with pytest.raises(ValueError, match="two tools are called 'forward'"):
        async with make_engine(clock=clock).session("x", tools=[forward, ToolSpec(name="forward")]):
            pass
    assert tool(forward)(1, b=2) == (1, 2)
    wrong: dict[str, Any] = {"capabilty": "x", "cost": -1, "idempotent": "yes"}
    with pytest.raises(
        ValueError,
        match=r"tool 'forward': cost: .*; idempotent: .*; .*mean 'capability'",
    ):
        tool(**wrong)(forward)


@pytest.mark.parametrize("field", ["expect", "confirm"])
def test_what_may_be_a_function(field):
    """What is neither a function nor a mapping is refused where either is expected, and None is left out."""
    problem = rf"tool 'forward': {field}: expected a function, or a mapping of fields to values, got 'x'; cost: must"
    with pytest.raises(ValueError, match=problem):
        tool(**{field: "x", "cost": -1})(forward)
    assert getattr(tool(**{field: None})(forward).spec, field) is None


def test_arguments_in_conditions():
    """A condition on an argument that the function does not take is refused, with the nearest that it takes."""

    def find(order_id: str, context: TaskContext) -> None: ...

    wrong = ["arguments.ordr_id == output.id", "arguments.context", "arguments.order_id != ''"]
    problem = (
        "tool 'find': expect.where[0]: condition 'arguments.ordr_id == output.id': the tool has no parameter 'ordr_id'; "
        "did you mean 'order_id'?; expect.where[1]: condition 'arguments.context': the tool has no parameter 'context'"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}$"):
        tool(expect={"where": wrong})(find)
    tool(expect={"where": ["'note' in arguments and arguments.note == 1"]})(find)
    tool(expect={"where": ["arguments.ordr_id == output.id"]})(any_number)


async def test_other_function_of_the_same_name(clock):
    """A function with the name of a tool of the session is refused, instead of that one being called."""
    async with make_engine(clock=clock).session(
        "x", tools=[tool(name="anything")(forward)]
    ) as session:
        with pytest.raises(ValueError, match="another tool is called 'anything'"):
            await session.call(anything, a=1)


async def test_json_for_functions(clock):
    """Functions that execute a plan get JSON as their types say; what does not fit is a failure of the task."""
    given: list[object] = []

    def take(
        point: Point, count: Annotated[int, Field(gt=0)], untyped, /, *, many: list[Point]
    ) -> None:
        given.extend([point, count, untyped, *many])

    def document(count: int) -> Plan:
        arguments: JsonObject = {
            "point": {"x": 1},
            "count": count,
            "untyped": {"y": 2},
            "many": [{"x": 3}],
        }
        return plan(Task(id="a", tool="take", arguments=arguments))

    assert (await make_engine(clock=clock).execute(document(1), tools=[take])).ok
    assert given == [Point(x=1), 1, {"y": 2}, Point(x=3)]
    failed = await make_engine(clock=clock).execute(document(0), tools=[take])
    assert "greater than 0" in failed.failures["a"].message


async def test_tools_without_functions(clock):
    """A plan that has tasks or tools without a function is refused before anything is executed; every one is named."""
    executed: list[str] = []

    def search() -> None:
        executed.append("search")

    stated = plan(
        Task(id="a", tool="search"),
        Task(id="b"),
        Task(id="c", tool="print"),
        tools=tuple(ToolSpec(name=name) for name in ("search", "print", "fax")),
    )
    with pytest.raises(PlanError) as refused:
        await make_engine(clock=clock).execute(stated, tools=[search])
    assert [problem.place for problem in refused.value.problems] == [
        "tools[1]",
        "tools[2]",
        "tasks[1].tool",
    ]
    assert "'fax'" in str(refused.value)
    assert not executed
