"""Functions as tools: their descriptions, their arguments, and their execution."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, update_wrapper
from types import NoneType, UnionType
from typing import (
    Any,
    Final,
    Generic,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from replanning.errors import PlanError, Problem, UnexpectedOutput, UnverifiedOutput
from replanning.plan.conditions import OUTPUT_ROOTS, Condition
from replanning.plan.document import Plan
from replanning.plan.json_values import copy_json
from replanning.plan.messages import brief_repr, did_you_mean, truncate, validation_problems
from replanning.plan.references import IDEMPOTENCY_KEY
from replanning.plan.tasks import DONE_UNLESS_NULL, Task, ToolSpec
from replanning.run.attempt import TaskContext, Work, run_in_thread
from replanning.run.event_loop import describe_error
from replanning.run.outputs import return_type_of

Parameters = ParamSpec("Parameters")

ReturnedT = TypeVar("ReturnedT")

_KIND: Final = "function"

_JSON_TYPES: Final[Sequence[tuple[type, str]]] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (Mapping, "object"),
    (Sequence, "array"),
    (set, "array"),
)

_MAX_CONDITION: Final = 81
"""Maximum length of a condition in a message."""

_NAMED: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)


class FunctionTool(Generic[Parameters, ReturnedT]):
    """Function as a tool; calling it calls the function.

    Args:
        function: the function. One that is not async is executed in a thread, which a cancellation
            does not stop. A parameter annotated as `TaskContext` receives the context of the task.
        fields: fields of its `ToolSpec`, such as `capability`, `effect`, `idempotent` and `retry`;
            they override the signature and the docstring. `expect` may also be a function, async or
            not, that checks each output: it returns None or True if the output is as expected, and
            False or a text, the reason, if it is not. `confirm` may be a function as well, async or
            not, that finds out whether a call without an answer was made. It gets the arguments of
            the call that it has parameters for, and the `idempotency_key` if it has a parameter of
            that name. It returns the output of the call, or None if the call was not made, and
            raises if it cannot tell; a boolean is ambiguous. It must only read.

    Attributes:
        spec: its description.
        confirmation: the function passed as `confirm`, as a tool; None without one.
        return_type: validates and dumps values of its return annotation; None without a useful one.

    Raises:
        TypeError: this is not a function, or its parameters are not known.
        ValueError: fields are unknown or invalid; names each of them.
    """

    def __init__(
        self,
        function: Callable[Parameters, ReturnedT],
        **fields: Any,
    ) -> None:
        self.function = function
        update_wrapper(self, function)
        try:
            self._signature = inspect.signature(function)
        except ValueError as error:
            raise TypeError(
                f"the parameters of {function!r} are not known; wrap it in a function of your own"
            ) from error
        try:
            hints: Mapping[str, object] = get_type_hints(function, include_extras=True)
        except Exception:  # noqa: BLE001 - names may be imported for type checkers only
            hints = {}
        self._returns = hints.get("return")
        self._hints = {
            name: hints.get(name, parameter.annotation) for name, parameter in self._parameters()
        }
        self._contexts = [
            name for name, hint in self._hints.items() if TaskContext in (hint, *get_args(hint))
        ]
        stated = [
            each for name, each in self._signature.parameters.items() if name not in self._contexts
        ]
        self._caller_signature = self._signature.replace(parameters=stated)
        named = {
            name: parameter for name, parameter in self._parameters() if name not in self._contexts
        }
        problems = _function_problems(fields)
        self._expects: Callable[[Any], object] | None = None
        if callable(fields.get("expect")):
            self._expects = fields.pop("expect")
        self.confirmation: FunctionTool[..., Any] | None = None
        if callable(fields.get("confirm")):
            self.confirmation = _confirming_tool(fields["confirm"])
            fields["confirm"] = _confirmation_by(self.confirmation)
            problems += self.confirmation._answer_problems()
        described: dict[str, object] = {
            "name": getattr(function, "__name__", type(function).__name__),
            "kind": _KIND,
            "description": " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split()),
            "parameters": {name: _type_name(self._hints[name]) for name in named},
            "optional": [
                name for name, each in named.items() if each.default is not inspect.Parameter.empty
            ],
        }
        try:
            self.spec: ToolSpec = ToolSpec.__pydantic_validator__.validate_python(
                described | fields
            )
        except ValidationError as error:
            problems += map(str, validation_problems(error, ToolSpec))
        else:
            problems += _argument_problems(self.spec, self._signature)
        if problems:
            name = fields.get("name", described["name"])
            raise ValueError(f"tool {name!r}: {'; '.join(problems)}")
        only, by_both, by_name = _NAMED
        self._positional_only = [name for name, each in self._parameters() if each.kind is only]
        self._positional = [each.name for each in stated if each.kind in (only, by_both)]
        self._by_name = frozenset(each.name for each in stated if each.kind in (by_both, by_name))
        self._required = frozenset(
            name for name, each in named.items() if each.default is inspect.Parameter.empty
        )
        self.return_type = return_type_of(function)
        self._is_async = any(
            map(inspect.iscoroutinefunction, (inspect.unwrap(function), type(function).__call__))
        )

    def __repr__(self) -> str:
        return f"<FunctionTool {self.spec.name!r} of {self.function!r}>"

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> ReturnedT:
        """Call the function."""
        return self.function(*args, **kwargs)

    def _parameters(self) -> Iterable[tuple[str, inspect.Parameter]]:
        return [
            (name, each) for name, each in self._signature.parameters.items() if each.kind in _NAMED
        ]

    def _answer_problems(self) -> Iterable[str]:
        """Yield reasons why the function cannot tell whether a call was made."""
        if self._returns is bool:
            yield (
                f"confirm: {self.spec.name!r} returns a boolean, which is ambiguous; return the"
                " output of the call, None if it was not done, and raise if that cannot be told"
            )

    def bind(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
        """Return the arguments of a call by name.

        Raises:
            TypeError: the function does not take them.
        """
        named: dict[str, object] = dict(zip(self._positional, args, strict=False))
        if (
            len(args) == len(named)
            and kwargs.keys() <= self._by_name
            and named.keys().isdisjoint(kwargs)
        ):
            named |= kwargs
            if self._required <= named.keys():
                return named
        # This takes several times as long, but says what is wrong.
        bound = self._caller_signature.bind(*args, **kwargs).arguments
        named = {}
        for name, value in bound.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                raise TypeError(
                    f"{self.spec.name!r} takes any number of positional arguments, which have no "
                    "names"
                )
            named |= dict(value) if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
        return named

    async def execute(
        self, arguments: Mapping[str, object], context: TaskContext, *, convert: bool
    ) -> object:
        """Execute the function.

        Args:
            arguments: by name.
            context: of the task.
            convert: whether the arguments are JSON and must be converted to the annotated types.

        Raises:
            Exception: any exception of the function; a ValidationError if an argument does not fit
                its type.
        """
        values = dict(arguments)
        for name in self._contexts:
            context.arguments = copy_json(context.arguments)  # which the function may change
            values[name] = context
        if convert:
            values |= {
                name: self._converted(name, value)
                for name, value in arguments.items()
                if name in self._hints
            }
        positional = [values.pop(name) for name in self._positional_only if name in values]
        function: Callable[..., Any] = self.function
        if self._is_async:
            result = function(*positional, **values)
        else:  # Trio refuses an awaitable as the result of a thread; a tuple may contain one.
            work = partial(function, *positional, **values)
            (result,) = await run_in_thread(lambda: (work(),))
        return await result if inspect.isawaitable(result) else result

    async def verify(
        self, output: object, value_of: Callable[[object], object] | None = None
    ) -> None:
        """Check an output with the function passed as `expect`, if any.

        Args:
            output: the output.
            value_of: extracts the value to check; by default the output itself.

        Raises:
            UnexpectedOutput: the output is not as expected.
            UnverifiedOutput: the function raised, or did not return None, a boolean or a text.
        """
        if self._expects is None:
            return
        try:
            value = output
            if value_of is not None:
                value = value_of(output)
            verdict = self._expects(value)
            if inspect.isawaitable(verdict):
                verdict = await verdict
        except Exception as error:
            # The tool has done its work, even if the check is broken.
            reason = f"`expect` of {self.spec.name!r} raised {describe_error(error)}"
            raise UnverifiedOutput(reason, output) from error
        if verdict is None or verdict is True:
            return
        if verdict is False:
            verdict = f"the output of {self.spec.name!r} is not as expected"
        if not isinstance(verdict, str):
            reason = f"`expect` of {self.spec.name!r} returned {brief_repr(verdict)}"
            raise UnverifiedOutput(f"{reason}; return None, a boolean or a text", output)
        raise UnexpectedOutput(verdict, output)

    def _converted(self, name: str, value: object) -> object:
        hint: Any = self._hints[name]
        if hint is inspect.Parameter.empty:
            return value
        try:
            adapter: TypeAdapter[object] = TypeAdapter(
                hint, config=ConfigDict(arbitrary_types_allowed=True)
            )
        except PydanticUserError:  # a model, which has its own configuration
            adapter = TypeAdapter(hint)
        return adapter.validate_python(value)


def _type_name(hint: object) -> str:
    """Return the JSON type of an annotation; `any` if it has none, or several."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        names = {_type_name(each) for each in get_args(hint) if each is not NoneType}
        return names.pop() if len(names) == 1 and NoneType not in get_args(hint) else "any"
    if hasattr(hint, "__metadata__"):  # Annotated[…]
        return _type_name(get_args(hint)[0])
    kind = origin or hint
    if not isinstance(kind, type):
        return "any"
    return next((name for base, name in _JSON_TYPES if issubclass(kind, base)), "any")


ToolFunction = Callable[..., Any]
"""Function that is or becomes a tool."""


@overload
def tool(function: Callable[Parameters, ReturnedT], /) -> FunctionTool[Parameters, ReturnedT]: ...
@overload
def tool(
    **fields: Any,
) -> Callable[[Callable[Parameters, ReturnedT]], FunctionTool[Parameters, ReturnedT]]: ...
def tool(function: Any = None, /, **fields: Any) -> Any:
    """Turn a function into a tool: a decorator with or without fields.

    Args:
        function: the function.
        fields: the fields of a `ToolSpec`, such as `capability`, `effect`, `idempotent`, `retry`,
            `requires`, `adds`, `cost`, `timeout`, `dangerous`, `expect` and `confirm`.
    """
    if function is None:
        return partial(tool, **fields)
    return FunctionTool(function, **fields)


class FunctionTools:
    """Tools by name, most of them functions.

    Args:
        tools: functions, and descriptions of tools that are executed elsewhere.

    Attributes:
        specs: the descriptions.
        functions: the functions by the names of their tools.
        confirmations: the names of the tools that only confirm calls.

    Raises:
        TypeError: some are neither functions nor descriptions; names each of them.
        ValueError: several have the same name, or a description is invalid; names each of them.
    """

    def __init__(self, tools: Iterable[ToolFunction | ToolSpec]) -> None:
        self.functions: dict[str, FunctionTool[..., Any]] = {}
        self.confirmations: set[str] = set()
        specs: dict[str, ToolSpec] = {}
        wrong: list[Exception] = []
        for each in tools:
            try:
                spec = each if isinstance(each, ToolSpec) else self.of(each).spec
            except (TypeError, ValueError) as error:
                wrong.append(error)
                continue
            if spec.name in specs:
                wrong.append(
                    ValueError(
                        f"two tools are called {spec.name!r}; give one of them another `name`"
                    )
                )
            specs[spec.name] = spec
        for function in self.functions.values():
            specs.setdefault(function.spec.name, function.spec)
        if wrong:
            kind = TypeError if any(isinstance(error, TypeError) for error in wrong) else ValueError
            raise kind("; ".join(dict.fromkeys(map(str, wrong))))
        self.specs = tuple(specs.values())

    def of(self, function: ToolFunction) -> FunctionTool[..., Any]:
        """Return the tool of a function; add it if it is new.

        Raises:
            ValueError: another tool has its name.
        """
        name = (
            function.spec.name
            if isinstance(function, FunctionTool)
            else getattr(function, "__name__", "")
        )
        known = self.functions.get(name)
        if known is None or function not in (known, known.function):
            made = as_function_tool(function)
            known = self.functions.setdefault(made.spec.name, made)
            if known.function is not made.function:
                raise ValueError(
                    f"another tool is called {made.spec.name!r}; give one of them another `name`"
                )
            if known.confirmation is not None:
                self.confirmations.add(self.of(known.confirmation).spec.name)
        return known

    def describe(self, plan: Plan) -> Plan:
        """Return the plan with these tools added."""
        known = {spec.name for spec in plan.tools}
        tools = (*plan.tools, *(spec for spec in self.specs if spec.name not in known))
        fields = {name: getattr(plan, name) for name in plan.model_fields_set}
        return Plan.model_validate({**fields, "tools": tools})

    def require_functions(self, plan: Plan) -> None:
        """Refuse a plan if none of these functions executes one of its tasks or tools.

        Raises:
            PlanError: names every one.
        """
        problems = [
            Problem(
                f"tools[{index}]",
                f"no function was given for the tool {spec.name!r}; give one, or leave the tool "
                "out",
            )
            for index, spec in enumerate(plan.tools)
            if spec.name not in self.functions
        ]
        problems += [
            Problem(
                f"tasks[{index}].tool",
                f"task {task.id!r} has no tool; name the one that executes it",
            )
            for index, task in enumerate(plan.tasks)
            if task.tool is None and task.include is None
        ]
        if problems:
            raise PlanError(problems)

    @property
    def return_types(self) -> dict[str, TypeAdapter[Any]]:
        """The return annotations of the functions, by the names of their tools."""
        return {
            name: function.return_type
            for name, function in self.functions.items()
            if function.return_type is not None
        }

    @property
    def work(self) -> Work:
        """Work that executes tasks with these functions."""

        async def work(task: Task, context: TaskContext) -> object:
            function = self.functions.get(task.tool or "")
            if function is None:
                raise LookupError(
                    f"no function was given for the tool {task.tool!r} of task {task.id!r}"
                )
            output = await function.execute(context.arguments, context, convert=True)
            await function.verify(output)
            return output

        return work


def _function_problems(fields: dict[str, Any]) -> list[str]:
    """Remove fields that are neither a function nor a mapping, and return problems about them."""
    problems: list[str] = []
    for field in ("confirm", "expect"):
        stated = fields.get(field)
        if not callable(stated) and not isinstance(stated, Mapping | BaseModel | None):
            got = brief_repr(fields.pop(field))
            problems.append(
                f"{field}: expected a function, or a mapping of fields to values, got {got}"
            )
    return problems


def _argument_problems(spec: ToolSpec, signature: inspect.Signature) -> Iterable[str]:
    """Yield conditions on the output that look up arguments that the function does not take.

    Such a condition can never be evaluated, so every output would be unexpected.
    """
    kinds = {each.kind for each in signature.parameters.values()}
    if spec.expect is None or inspect.Parameter.VAR_KEYWORD in kinds:
        return
    for number, text in enumerate(spec.expect.where):
        condition = Condition.parse(text, OUTPUT_ROOTS)
        # A condition may check whether an argument is present, and then look it up.
        names = condition.names("arguments") - condition.questions("arguments")
        for name in sorted(names - spec.parameters.keys()):
            which = f"expect.where[{number}]: condition {truncate(text, _MAX_CONDITION)!r}"
            hint = did_you_mean(name, spec.parameters)
            if hint:
                hint = f"; {hint}"
            yield f"{which}: the tool has no parameter {name!r}{hint}"


def _confirming_tool(function: ToolFunction) -> FunctionTool[..., Any]:
    """Return the tool of a function that confirms calls."""
    if isinstance(function, FunctionTool):
        return function
    return FunctionTool(function, effect="none")


def _confirmation_by(tool: FunctionTool[..., Any]) -> dict[str, object]:
    """Return the confirmation for a function: its output is the output of the call, or None."""
    arguments: dict[str, str] = {}
    for name in tool.spec.parameters:
        arguments[name] = f"${{arguments.{name}}}"
        if name == IDEMPOTENCY_KEY:
            arguments[name] = f"${{{name}}}"
    return {"tool": tool.spec.name, "arguments": arguments, "when": DONE_UNLESS_NULL}


def as_function_tool(function: ToolFunction) -> FunctionTool[..., Any]:
    """Return a function as a tool."""
    return function if isinstance(function, FunctionTool) else FunctionTool(function)
