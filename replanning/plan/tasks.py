"""Parts of a plan document: goal, tasks, tools, budget and MCP servers."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    JsonValue,
    SerializerFunctionWrapHandler,
    StringConstraints,
    Tag,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from replanning.errors import ExpressionError, PlanError, ReplanningError
from replanning.plan.conditions import OUTPUT_ROOTS, Condition, output_lookup
from replanning.plan.json_values import as_text, iter_strings
from replanning.plan.messages import validation_problems
from replanning.plan.references import (
    CONFIRMATION_ROOTS,
    CONFIRMED_ROOTS,
    IDEMPOTENCY_KEY,
    KEY_ROOTS,
    fact_problem,
    fill_placeholders,
    is_one_reference,
    normalise_fact,
    placeholders,
    root_reference_problem,
)
from replanning.plan.schemas import invalid_schema
from replanning.plan.types import MAX_NAME_CHARS, JsonObject, TaskId

# Names stand in messages, where nobody would see a blank at an end or a line break.
_NAME_PATTERN: Final = (
    r"^[^\s\x00-\x1f\x7f-\x9f](?:[^\x00-\x1f\x7f-\x9f]*[^\s\x00-\x1f\x7f-\x9f])?$"
)
_TEXT_PATTERN: Final = r"^[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]*$"
_NONBLANK_PATTERN: Final = rf"{_TEXT_PATTERN[:-1]}[^\s\x00-\x1f\x7f-\x9f]{_TEXT_PATTERN[1:]}"
"""Text that is more than whitespace."""

_NameConstraints = StringConstraints(min_length=1, max_length=MAX_NAME_CHARS, pattern=_NAME_PATTERN)
Name = Annotated[str, _NameConstraints]
Id = Annotated[TaskId, _NameConstraints]
Text = Annotated[str, StringConstraints(pattern=_TEXT_PATTERN)]
NonBlankText = Annotated[str, StringConstraints(pattern=_NONBLANK_PATTERN)]


def _validate_fact(text: str) -> str:
    if problem := fact_problem(text):
        raise ValueError(f"this is not a fact: {problem}")
    return normalise_fact(text)


Fact = Annotated[
    str, StringConstraints(min_length=1, pattern=_NONBLANK_PATTERN), AfterValidator(_validate_fact)
]


def to_seconds(duration: float | timedelta) -> float:
    """Return a duration in seconds; a number is returned as it is."""
    if isinstance(duration, timedelta):
        return duration.total_seconds()
    return duration


# Strict, because a number in quotes is a mistake to report, not a number.
NonNegativeFloat = Annotated[float, Field(strict=True, ge=0)]
Duration = Annotated[float, Field(strict=True, ge=0), BeforeValidator(to_seconds)]
Seconds = Annotated[float, Field(strict=True, gt=0), BeforeValidator(to_seconds)]
NonNegativeInt = Annotated[int, Field(strict=True, ge=0)]
StrictInt = Annotated[int, Field(strict=True)]
StrictBool = Annotated[bool, Field(strict=True)]


T = TypeVar("T")


class _AsTuple:
    """Validation of any sequence as a tuple."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(GenericAlias(tuple, (get_args(source)[0], ...)))


Items = Annotated[Sequence[T], _AsTuple]
"""Field that takes a list or tuple and holds a tuple."""


class StrictModel(BaseModel):
    """Base of the parts of a plan: immutable, without unknown fields.

    Raises:
        PlanError: a field is wrong or unknown; names every one, and the nearest known field.
    """

    # A misspelt field would otherwise be dropped silently, and its default would apply.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def _construction_error(cls, error: ValidationError) -> ReplanningError:
        return PlanError(validation_problems(error, cls, root=cls.__name__))

    if not TYPE_CHECKING:  # pragma: no branch - a type checker knows the fields of each model

        def __init__(self, **fields: object) -> None:
            try:
                self.__pydantic_validator__.validate_python(fields, self_instance=self)
            except ValidationError as error:
                raise self._construction_error(error) from None

        __init__.__pydantic_base_init__ = (
            True  # documents are validated without a call for each of their parts
        )

        @classmethod
        def model_validate(cls, obj: object, **options: object) -> Self:
            """Return the object that a mapping describes; raises like the constructor."""
            return cls._checked(super().model_validate, obj, **options)

        @classmethod
        def model_validate_json(cls, json_data: str | bytes | bytearray, **options: object) -> Self:
            """Return the object that a JSON text describes; raises like the constructor."""
            return cls._checked(super().model_validate_json, json_data, **options)

        @classmethod
        def model_validate_strings(cls, obj: object, **options: object) -> Self:
            """Return the object that a mapping of texts describes; raises like the constructor."""
            return cls._checked(super().model_validate_strings, obj, **options)

        @classmethod
        def _checked(
            cls, validate: Callable[..., Self], *arguments: object, **options: object
        ) -> Self:
            try:
                return validate(*arguments, **options)
            except ValidationError as error:
                # Without its cause: pydantic's text repeats the input, which may contain a secret.
                raise cls._construction_error(error) from None


DEFAULT_START_TIMEOUT: Final = 30.0
"""Default start-up timeout of a server, in seconds."""


def _split_command(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return shlex.split(value)
    except ValueError:
        raise ValueError("a quotation in the command is not closed") from None


CommandLine = Annotated[
    tuple[str, ...],
    BeforeValidator(_split_command),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


class McpServer(StrictModel):
    """Server of the Model Context Protocol: a program to start, or an address."""

    command: CommandLine | None = Field(
        default=None,
        description="The program and its arguments, as a list or as one line; no shell reads it.",
    )
    cwd: str | None = Field(default=None, description="The working directory of the program.")
    env: Mapping[str, str] = Field(
        default_factory=dict,
        description=(
            "Environment of the program beside PATH, HOME and the like; {env:NAME} is "
            "looked up at the start."
        ),
    )
    url: str | None = Field(
        default=None, description="The address of a server that runs already (streamable HTTP)."
    )
    headers: Mapping[str, str] = Field(
        default_factory=dict, description="Request headers; {env:NAME} is looked up at the start."
    )
    tools: Items[Name] | None = Field(
        default=None,
        description="The only tools of the server that may be used; all of them by default.",
    )
    safe: Items[Name] = Field(
        default=(),
        description="Tools of the server that are not dangerous, regardless of what the server says.",
    )
    timeout: Seconds = Field(
        default=DEFAULT_START_TIMEOUT,
        description="Start-up timeout in seconds, tool discovery included.",
    )

    @property
    def location(self) -> str:
        """Command line or address."""
        return shlex.join(self.command) if self.command else self.url or ""

    def problems(self) -> list[str]:
        """Return everything that makes it unusable on any machine."""
        # Returned instead of raised, so that one error can name the problems of all servers.
        found = []
        if (self.command is None) == (self.url is None):
            found.append("it needs either a `command` that starts it or a `url`, and not both")
        if self.command is not None:
            if not all(self.command[:1] or [""]):
                found.append("its command names no program")
            if any("\0" in word for word in self.command):
                found.append("its command holds the character NUL")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            found.append(f"its url {self.url!r} begins neither with http:// nor with https://")
        idle = [name for name in ("cwd", "env") if getattr(self, name) and self.command is None]
        idle += ["headers"] if self.headers and self.url is None else []
        found += [f"`{name}` has no meaning for it" for name in idle]
        allowed = frozenset(self.safe if self.tools is None else self.tools)
        strange = [name for name in self.safe if name not in allowed]
        if strange:
            found.append(f"{strange} under `safe` are not among its `tools`")
        return found


class Goal(StrictModel):
    """Goal of the plan."""

    objective: Text = Field(description="The aim, in words.")
    success_criteria: Items[Text] = Field(
        default=(), description="How a person sees that it was achieved."
    )
    facts: Items[Fact] = Field(default=(), description="Facts that must hold at the end.")
    stop_when_reached: StrictBool = Field(
        default=False,
        description=(
            "Succeed as soon as all facts of the goal hold, whatever has become of the tasks."
        ),
    )

    def with_fields(self, fields: Mapping[str, object]) -> Goal:
        """Return the goal with some fields replaced.

        Raises:
            PlanError: the result is not a valid goal; lists every problem.
        """
        # `model_copy` would take any value unchecked, and a goal may come from a message.
        return Goal.model_validate({**self.model_dump(), **fields})


_CLASS_PATTERN: Final = r"^[^\W\d]\w*(\.[^\W\d]\w*)*$"


TIMEOUT: Final = "timeout"
"""Entry of `on` in `Retry` for every time limit: of the task, of its tool, and of clients."""

EXIT_CODES: Final = range(1, 256)
ERROR_STATUSES: Final = range(400, 600)
"""HTTP statuses that say of themselves that they are errors; no exit code is as large."""


def _check_retryable(value: object) -> object:
    match value:
        case str() if re.match(_CLASS_PATTERN, value):
            return value
        case bool():
            pass
        case int() if value in EXIT_CODES or value in ERROR_STATUSES:
            return value
    raise ValueError(
        "expected a class of exceptions, such as httpx.ReadTimeout, an exit code from 1 to 255, "
        "an HTTP status from 400 to 599, or timeout"
    )


Retryable = Annotated[
    Annotated[int, Field(ge=1, le=255)]
    | Annotated[int, Field(ge=400, le=599)]
    | Annotated[str, Field(pattern=_CLASS_PATTERN)],
    BeforeValidator(_check_retryable),
]

_DEFAULT_MAX_DELAY: Final = 3600.0

_MAX_DOUBLINGS: Final = 62
"""By then every delay has reached the maximum, and a float still holds it."""

_MAX_COUNTED_ATTEMPTS: Final = 10**15
"""More would be pointless; a float can represent their total time."""


class Retry(StrictModel):
    """Attempts at a task: how many, how far apart, and after which failures.

    Whoever states `max_attempts` gets them after every failure, or after those that `on` names.
    Without it, a task is tried again after failures that may pass, and after those that `on` names.
    Where nobody knows whether a failed attempt had its effect, `idempotent: false` forbids both.
    """

    max_attempts: Annotated[int, Field(strict=True, ge=1)] = Field(
        default=3,
        description="Attempts, the first included; where it is stated, after every failure.",
    )
    delay: Duration = Field(default=1.0, description="Seconds before the second attempt.")
    backoff: Literal["exponential", "constant"] = Field(
        default="exponential",
        description="exponential: the delay doubles after each attempt; constant: it stays.",
    )
    exponential: Annotated[StrictBool | None, WithJsonSchema({"type": "boolean"})] = Field(
        default=None,
        description=(
            "How earlier versions wrote `backoff`: true for exponential, false for constant."
        ),
    )
    max_delay: Duration | None = Field(
        default=None,
        description="Longest delay in seconds; by default an hour, or `delay` if that is longer.",
    )
    jitter: StrictBool = Field(
        default=True,
        description="Vary the delay at random, so that retries do not come all at once.",
    )
    max_seconds: Seconds | None = Field(
        default=None,
        description=(
            "Seconds after the start of the first attempt within which a further one may begin."
        ),
    )
    on: Items[Retryable] | None = Field(
        default=None,
        description=(
            "The failures that are tried again: classes of exceptions "
            "(httpx.ReadTimeout), HTTP statuses, exit codes, timeout."
        ),
    )

    @property
    def states_attempts(self) -> bool:
        """Whether `max_attempts` was stated and is not merely the default."""
        return "max_attempts" in self.model_fields_set

    @property
    def names_timeouts(self) -> bool:
        """Whether a task that reaches its time limit is among the failures under `on`."""
        if self.on is None:
            return False
        return TIMEOUT in self.on

    @property
    def longest_wait(self) -> float:
        """Seconds that the delays between all attempts take together, at most."""
        retries = min(self.max_attempts, _MAX_COUNTED_ATTEMPTS) - 1
        different = min(retries, _MAX_DOUBLINGS)
        wait = 0.0
        for attempts in range(1, different + 1):
            wait += self.delay_after(attempts, 1.0)
        wait += (retries - different) * self.delay_after(_MAX_DOUBLINGS + 1, 1.0)
        if self.max_seconds is not None:
            wait = min(wait, self.max_seconds)
        return min(wait, sys.float_info.max)

    def longest_time(self, attempt: float) -> float:
        """Return the seconds from the start of the first attempt to the end of the last, at most.

        Args:
            attempt: the time limit of each attempt in seconds.
        """
        attempts = min(self.max_attempts, _MAX_COUNTED_ATTEMPTS)
        total = attempts * attempt + self.longest_wait
        if self.max_seconds is not None:
            total = min(total, self.max_seconds + attempt)
        return min(total, sys.float_info.max)

    def delay_after(self, attempts: int, chance: float = 0.5) -> float:
        """Return the seconds between a failed attempt and the next one.

        Args:
            attempts: the attempts made so far.
            chance: a number from 0 to 1 that varies the delay by a half where it has `jitter`; at
                0.5 it stays as it is.
        """
        delay = self.delay
        if self.backoff == "exponential":
            delay *= 2 ** min(attempts - 1, _MAX_DOUBLINGS)
        # Tasks that failed together would otherwise hit a recovering service together.
        if self.jitter:
            delay *= 0.5 + chance
        longest = self.max_delay
        if longest is None:
            longest = max(self.delay, _DEFAULT_MAX_DELAY)
        return min(delay, longest)

    @model_validator(mode="before")
    @classmethod
    def _read_exponential(cls, fields: object) -> object:
        """Read `exponential` as `backoff`, so that a plan is the same in either spelling."""
        if not isinstance(fields, Mapping):
            return fields
        if not isinstance(fields.get("exponential"), bool):
            return fields
        if "backoff" in fields:
            raise ValueError(
                "`exponential` is an earlier spelling of `backoff`; state `backoff` alone"
            )
        read = {name: value for name, value in fields.items() if name != "exponential"}
        read["backoff"] = "exponential" if fields["exponential"] else "constant"
        return read

    @field_validator("on")
    @classmethod
    def _check_names(cls, names: Sequence[int | str] | None) -> Sequence[int | str] | None:
        if names == ():
            raise ValueError(
                "names no failure; leave it out, or state `max_attempts: 1` to try once"
            )
        return names

    @model_serializer(mode="wrap")
    def _keep_stated_attempts(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Journals leave out defaults, but a stated default says more than an omitted one.
        fields: dict[str, Any] = serialize(self)
        if "max_attempts" in self.model_fields_set:
            fields["max_attempts"] = self.max_attempts
        return fields


class Budget(StrictModel):
    """Budget of a run; omitted parts are unlimited."""

    calls: NonNegativeInt | None = Field(default=None, description="Calls of language models.")
    tokens: NonNegativeInt | None = Field(
        default=None, description="Tokens, input and output together."
    )
    money: NonNegativeFloat | None = Field(
        default=None, description="Money, in the currency of the prices."
    )
    wall_clock: Duration | None = Field(
        default=None,
        description="Seconds; those in which only a person is waited for do not count.",
    )


ChangingEffect = Literal["reversible", "partly", "irreversible"]
"""Effect of what changes something, by whether that can be taken back."""

Effect = Literal["none", ChangingEffect]
"""Effect of a tool or a task; `none` only reads."""


def _checked_condition(condition: str) -> str:
    """Return a condition on an output if it can be read."""
    try:
        Condition.parse(condition, OUTPUT_ROOTS)
    except ExpressionError as error:
        raise ValueError(str(error)) from None
    return condition


def _checked_path(path: str) -> str:
    """Return a path into an output if it can be read."""
    if path.startswith(("output.", "output[")):
        inner = path.removeprefix("output").removeprefix(".")
        own = f'["output"]{path.removeprefix("output")}'
        raise ValueError(
            f"{path!r} begins within the output already: write {inner!r}, "
            f"or {own!r} for a field of the output that is called output"
        )
    try:
        output_lookup(path)
    except ExpressionError as error:
        raise ValueError(str(error)) from None
    return path


OutputPath = Annotated[str, AfterValidator(_checked_path)]


class Agreement(StrictModel):
    """Second tool that must give the same output for the same arguments."""

    tool: Name = Field(description="The tool to ask: of the same capability, and it only reads.")
    fields: Items[OutputPath] | None = Field(
        default=None,
        description="Paths into the output to compare: json.total; by default all of it.",
    )
    tolerance: NonNegativeFloat = Field(
        default=0.0, description="How far apart two numbers may be, in their own unit."
    )

    @model_validator(mode="before")
    @classmethod
    def _read_name(cls, stated: object) -> object:
        """Read the name of a tool as an agreement of whole outputs."""
        if isinstance(stated, str):
            return {"tool": stated}
        return stated

    @field_validator("fields")
    @classmethod
    def _check_fields(cls, fields: Sequence[str] | None) -> Sequence[str] | None:
        if fields == ():
            raise ValueError("names nothing to compare; leave it out to compare the whole outputs")
        return fields

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [{"type": "string"}, handler.resolve_ref_schema(handler(core_schema))]}


class Expectation(StrictModel):
    """Expectation of an output. An attempt whose output violates it has failed."""

    model_config = ConfigDict(populate_by_name=True)

    json_schema: dict[str, JsonValue] | None = Field(
        default=None, alias="schema", description="JSON Schema of the output."
    )
    where: Items[Annotated[str, AfterValidator(_checked_condition)]] = Field(
        default=(),
        description=(
            "Conditions over output, text, arguments.*, context.*, parameters.*, "
            "results.*, run.started, and in a task with `for_each` item, index and key."
        ),
    )
    errors: Items[Annotated[str, Field(min_length=1)]] = Field(
        default=(),
        description="Texts that say that it failed: how they begin, or with * for any characters.",
    )
    means: Literal["not-done"] | None = Field(
        default=None,
        description="Meaning of an output that matches `errors`: not-done, nothing was changed.",
    )
    commands: Items[NonBlankText] = Field(
        default=(),
        description="Commands that must end with exit code 0; {name} is an argument, as one word.",
    )
    agrees_with: Agreement | None = Field(
        default=None, description="Another tool, which is called as well and must say the same."
    )

    @property
    def second_tool(self) -> str:
        """The tool that must say the same; empty without one."""
        return "" if self.agrees_with is None else self.agrees_with.tool

    @field_validator("json_schema")
    @classmethod
    def _check_schema(cls, schema: dict[str, JsonValue] | None) -> dict[str, JsonValue] | None:
        if schema is not None:
            problem = invalid_schema(schema)
            if problem:
                raise ValueError(problem)
        return schema

    @model_validator(mode="after")
    def _check_means(self) -> Self:
        if self.means is not None and not self.errors:
            raise ValueError("`means` says what `errors` mean, and there are no `errors`")
        return self

    @model_serializer(mode="wrap")
    def _by_alias(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        if "json_schema" in fields:
            fields["schema"] = fields.pop("json_schema")
        return fields


WHOLE_OUTPUT: Final = "${output}"
"""Output of a confirmed task by default: that of the tool which was asked."""

DONE_UNLESS_NULL: Final = "output != null"
"""Condition of a confirmation by a function, which returns the output of the call, or else None."""


class Confirmation(StrictModel):
    """Reading call that tells whether a call without an answer was done all the same."""

    tool: Name = Field(description="The tool to ask; it only reads.")
    arguments: JsonObject = Field(
        default_factory=dict,
        description=(
            "Given to it; may hold ${arguments.name}, ${results.task}, ${context.name}, "
            "${parameters.name} and ${idempotency_key}."
        ),
    )
    when: Annotated[str, AfterValidator(_checked_condition)] = Field(
        description=(
            "Holds of its output if the call was done, over the same as `where` of `expect`."
        )
    )
    output: JsonValue = Field(
        default=WHOLE_OUTPUT,
        description=(
            "The output of the task if it was done; by default that of the tool which was asked."
        ),
    )

    @property
    def call(self) -> TaskBody:
        """The call that asks, with its references."""
        return TaskBody(tool=self.tool, arguments=self.arguments, effect="none")

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, arguments: JsonObject) -> JsonObject:
        problem = root_reference_problem(arguments, CONFIRMATION_ROOTS)
        if problem:
            raise ValueError(problem)
        return arguments

    @field_validator("output")
    @classmethod
    def _check_output(cls, output: JsonValue) -> JsonValue:
        problem = root_reference_problem(output, CONFIRMED_ROOTS)
        if problem:
            raise ValueError(problem)
        return output


def artifact_fact(name: str) -> str:
    """Return the fact, or pattern of facts, that a name in `needs` or `produces` stands for."""
    return f"artifact({name})"


class Undo(StrictModel):
    """Call that takes the effect of a call back."""

    tool: Name = Field(description="The tool that takes it back.")
    arguments: JsonObject = Field(
        default_factory=dict,
        description=(
            "Given to that tool; may hold ${output.name}, ${arguments.name}, "
            "${results.task}, ${context.name}, ${parameters.name} and ${item.name}."
        ),
    )


class ToolSpec(StrictModel):
    """Tool that executes tasks, as executors and planners need to know it."""

    name: Name = Field(description="How tasks name it.")
    kind: Name | None = Field(
        default=None, description="shell, http, python, agent, mcp, or a kind a plugin executes."
    )
    capability: Name | None = Field(
        default=None, description="Tools of one capability can stand in for one another."
    )
    description: Text = Field(
        default="", description="Its description, for people and language models."
    )
    parameters: Mapping[str, Name] = Field(
        default_factory=dict,
        description=(
            "Parameter to type: string, path, integer, number, boolean, array, object, "
            "any, or one of `objects`."
        ),
    )
    optional: Items[Name] = Field(default=(), description="The parameters that may be left out.")
    requires: Items[Fact] = Field(
        default=(), description="Facts that must hold before, as patterns: on({x},{y})."
    )
    adds: Items[Fact] = Field(default=(), description="Facts that hold after it.")
    removes: Items[Fact] = Field(default=(), description="Facts that no longer hold after it.")
    needs: Items[Fact] = Field(
        default=(), description="Artifacts needed: X is short for requiring artifact(X)."
    )
    produces: Items[Fact] = Field(
        default=(), description="Artifacts produced: X is short for adding artifact(X)."
    )
    resources: Mapping[Name, NonNegativeFloat] = Field(
        default_factory=dict, description="How much of each resource one use takes."
    )
    cost: NonNegativeFloat | None = Field(
        default=None, description="The cost of one use, to compare tools."
    )
    available: StrictBool = Field(default=True, description="Whether it can be used now.")
    transient: Items[StrictInt] = Field(
        default=(), description="Exit codes or HTTP statuses that may pass on a retry."
    )
    accepted: Items[StrictInt] = Field(
        default=(),
        description="Exit codes other than 0, or HTTP statuses, that are results and not failures.",
    )
    dangerous: StrictBool = Field(
        default=False,
        description="Whether a person must agree before a replan or a model uses it; "
        "a task of your plan that names it runs without a question.",
    )
    effect: Effect | None = Field(
        default=None,
        description=(
            "Its effect: none (it only reads), reversible, partly (reversible in "
            "part) or irreversible."
        ),
    )
    undo: Undo | None = Field(
        default=None, description="Compensating action, for an effect that can be undone."
    )
    undo_on_replace: StrictBool = Field(
        default=False,
        description="Whether its effect is taken back before another call takes its place.",
    )
    idempotent: StrictBool | None = Field(
        default=None, description="Whether running it twice does no more than running it once."
    )
    command: str | None = Field(
        default=None, description="shell: the command line; {name} is the argument, as one word."
    )
    method: Name | None = Field(default=None, description="http: the request method.")
    url: str | None = Field(default=None, description="http: where to; {name} is the argument.")
    headers: Mapping[str, str] = Field(default_factory=dict, description="http: request headers.")
    body: JsonValue = Field(default=None, description="http: the JSON body.")
    idempotency_header: Name | None = Field(
        default=None,
        description=(
            "http: the header for the idempotency key; Idempotency-Key by default for "
            "changing requests."
        ),
    )
    callable: Name | None = Field(default=None, description="python: module:function.")
    server: Name | None = Field(default=None, description="mcp: the server in the section `mcp`.")
    tool: Name | None = Field(
        default=None, description="mcp: its name on the server, if different."
    )
    input_schema: dict[str, JsonValue] | None = Field(
        default=None,
        description="mcp: JSON Schema of the arguments; asked of the server where it is left out.",
    )
    cwd: str | None = Field(default=None, description="Working directory.")
    workspace: str | None = Field(
        default=None,
        description=(
            "Directory outside of which paths are refused; a command may write nowhere "
            "else, given bubblewrap."
        ),
    )
    env: Mapping[str, str] = Field(
        default_factory=dict,
        description="Environment; {env:NAME} is looked up when the tool is run.",
    )
    timeout: Seconds | None = Field(
        default=None, description="Timeout in seconds, unless the task has one."
    )
    retry: Retry | None = Field(
        default=None,
        description=(
            "How often it is tried, and after which failures, where the task does not say so."
        ),
    )
    expect: Expectation | None = Field(
        default=None, description="Expectations of its output; otherwise the attempt has failed."
    )
    confirm: Confirmation | None = Field(
        default=None,
        description="How to find out whether a call without an answer was made.",
    )

    @property
    def precondition_patterns(self) -> tuple[str, ...]:
        """Patterns of the facts that must hold before a use: `requires` and `needs`."""
        return (*self.requires, *map(artifact_fact, self.needs))

    @property
    def addition_patterns(self) -> tuple[str, ...]:
        """Patterns of the facts that hold after a use: `adds` and `produces`."""
        return (*self.adds, *map(artifact_fact, self.produces))

    @property
    def fact_patterns(self) -> tuple[str, ...]:
        """Patterns of all facts that the tool needs or changes."""
        return (*self.precondition_patterns, *self.addition_patterns, *self.removes)

    @property
    def filled_texts(self) -> tuple[str, ...]:
        """The texts of its call into which arguments are filled."""
        texts = [*self.headers.values(), *iter_strings(self.body, keys=False)]
        texts += filter(None, (self.command, self.url))
        return tuple(texts)

    @property
    def parameter_types(self) -> Mapping[str, str]:
        """Its parameters with their types; if it declares none, the placeholders of its texts."""
        if self.parameters:
            return self.parameters
        types: dict[str, str] = {}
        for text in (*self.fact_patterns, *self.filled_texts):
            types.update(dict.fromkeys(placeholders(text), "any"))
        types.pop(IDEMPOTENCY_KEY, None)  # which the executor fills in
        return types

    def preconditions(self, arguments: Mapping[str, JsonValue]) -> tuple[str, ...]:
        """Return the facts that must hold before a use (`requires` and `needs`).

        Raises:
            PlanError: a pattern names a parameter that `arguments` lacks.
        """
        return self._ground(self.precondition_patterns, arguments)

    def additions(self, arguments: Mapping[str, JsonValue]) -> tuple[str, ...]:
        """Return the facts that hold after a use with these arguments (`adds` and `produces`).

        Raises:
            PlanError: a pattern names a parameter that `arguments` lacks.
        """
        return self._ground(self.addition_patterns, arguments)

    def deletions(self, arguments: Mapping[str, JsonValue]) -> tuple[str, ...]:
        """Return the facts that no longer hold after a use with these arguments.

        Raises:
            PlanError: a pattern names a parameter that `arguments` lacks.
        """
        return self._ground(self.removes, arguments)

    def _ground(
        self, patterns: Sequence[str], arguments: Mapping[str, JsonValue]
    ) -> tuple[str, ...]:
        facts = []
        for pattern in patterns:
            names = placeholders(pattern)
            if lacking := [name for name in names if name not in arguments]:
                text = f"tool {self.name!r}: {pattern!r} needs the arguments {lacking}, given are {list(arguments)}"
                raise PlanError.at("", text)
            filled = fill_placeholders(pattern, {name: as_text(arguments[name]) for name in names})
            # Validation has normalised a pattern that has nothing to fill in.
            facts.append(normalise_fact(filled) if names else filled)
        return tuple(facts)


OnStale = Literal["ignore", "warn", "redo"]


class TaskBody(StrictModel):
    """Fields of tasks and fallbacks."""

    name: Text | None = Field(
        default=None, description="How people call it; with `for_each`, may hold ${item}."
    )
    tool: Name | None = Field(default=None, description="The tool that executes it.")
    arguments: JsonObject = Field(
        default_factory=dict,
        description=(
            "Given to the tool; may hold ${task.output}, ${context.name}, "
            "${parameters.name}, and with `for_each` ${item}, ${index} and ${key}."
        ),
    )
    goal: Text | None = Field(
        default=None, description="The purpose of the task; with `for_each`, may contain ${item}."
    )
    priority: StrictInt = Field(
        default=0,
        description="Ready tasks of a lower number run earlier; ties in the plan's order.",
    )
    timeout: Seconds | None = Field(
        default=None, description="Seconds for one attempt; none by default."
    )
    retry: Retry | None = Field(
        default=None, description="How often it is tried, and after which failures."
    )
    optional: StrictBool = Field(
        default=False, description="Whether the plan may succeed without it."
    )
    when: str | None = Field(
        default=None,
        description=(
            "A condition over context.*, parameters.*, results.* and status.*; skipped "
            "when false. With `for_each`, one over item, index or key leaves out elements."
        ),
    )
    effect: Effect | None = Field(
        default=None, description="Its effect, if the tool declares none."
    )
    idempotent: StrictBool | None = Field(
        default=None,
        description="Whether running it twice does no more than once; by default as its tool says.",
    )
    on_stale: OnStale | None = Field(
        default=None,
        description="Reaction when its result becomes stale; by default that of the plan.",
    )
    fallbacks: Items[Fallback] = Field(default=(), description="Its substitutes, best first.")
    undo: Fallback | None = Field(
        default=None, description="Its compensating action; by default that of its tool."
    )
    undo_on_replace: StrictBool | None = Field(
        default=None,
        description=(
            "Whether its effect is taken back before another call takes its place; by "
            "default as its tool says."
        ),
    )
    acceptance: Items[Text] = Field(
        default=(),
        description="How a person or a model sees that it was done well, in words.",
    )
    expect: Expectation | None = Field(
        default=None,
        description="Expectations of its output, in addition to those of its tool.",
    )
    confirm: Confirmation | None = Field(
        default=None,
        description=(
            "How to find out whether a call without an answer was made; by default as for its tool."
        ),
    )
    resources: Mapping[Name, NonNegativeFloat] = Field(
        default_factory=dict, description="Resources in addition to those of its tool."
    )
    metadata: JsonObject = Field(
        default_factory=dict, description="Anything you want to keep with it."
    )

    @property
    def commands(self) -> Sequence[str]:
        """The commands that must succeed after its work (`expect.commands`)."""
        return () if self.expect is None else self.expect.commands

    @property
    def lasting_expectation(self) -> Expectation:
        """Expectations of a substitute: its commands, and nothing about the output."""
        return Expectation(commands=self.commands)


class Fallback(TaskBody):
    """Task without an id that may replace the task that declares it."""


READING_METHODS: Final = ("GET", "HEAD", "OPTIONS")
"""HTTP methods that change nothing."""


READING_ADVICE: Final = "`effect: none` if it only reads"
CONFIRM_ADVICE: Final = "`confirm` if another tool can tell whether it was done"
"""Declarations that allow repeating a call, and giving it to another tool."""


def effect_of(task: TaskBody, tool: ToolSpec | None) -> Effect | None:
    """Return the declared effect of a task, or else of its tool; None if unknown."""
    if task.effect is not None:
        return task.effect
    if tool is None:
        return None
    # An author who states `idempotent` for a GET knows more about it than its method says.
    says_nothing = tool.effect is None and tool.idempotent is None
    if says_nothing and tool.kind == "http" and _http_method(tool) in READING_METHODS:
        return "none"
    return tool.effect


def has_no_effect(task: TaskBody, tool: ToolSpec | None) -> bool:
    """Return whether a task only reads; its own declaration beats that of its tool."""
    return effect_of(task, tool) == "none"


def is_undone_on_replace(task: TaskBody, tool: ToolSpec | None) -> bool:
    """Return whether the effect of a task is taken back before another call takes its place."""
    if task.undo_on_replace is not None:
        return task.undo_on_replace
    return tool is not None and tool.undo_on_replace


def is_repeatable(task: TaskBody, tool: ToolSpec | None) -> bool:
    """Return whether running a task twice does no more than once: it only reads, or is idempotent.

    Declarations of the task about effect or idempotence beat those of its tool.
    """
    if task.effect == "none":
        return True
    if task.idempotent is not None:
        return task.idempotent
    if has_no_effect(task, tool):
        return True
    if tool is None:
        return False
    if tool.idempotent is not None:
        return tool.idempotent
    # RFC 9110 defines these methods as idempotent; the tool did not say otherwise.
    return tool.kind == "http" and _http_method(tool) in ("PUT", "DELETE")


def confirmation_of(task: TaskBody, tool: ToolSpec | None) -> Confirmation | None:
    """Return the declared confirmation of a task, or else of its tool.

    None if none is declared, or if the call changes nothing.
    """
    confirm = task.confirm
    if confirm is None and tool is not None:
        confirm = tool.confirm
    if confirm is None or has_no_effect(task, tool):
        return None
    return confirm


def asking_problem(tool: ToolSpec) -> str:
    """Return why a tool cannot be asked whether a call was done; empty if it can."""
    if tool.dangerous:
        return f"{tool.name!r} is `dangerous`, and would be used without asking a person"
    # It is called unasked, and must not change anything.
    if not has_no_effect(TaskBody(), tool):
        return f"{tool.name!r} may change something; state {READING_ADVICE}"
    return ""


def stated_retry(task: TaskBody, tool: ToolSpec | None) -> Retry | None:
    """Return the declared retries of a task, or else of its tool."""
    if task.retry is None and tool is not None:
        return tool.retry
    return task.retry


def allows_repetition(task: TaskBody, tool: ToolSpec | None, *, is_named: bool) -> bool:
    """Return whether a call in doubt is repeated unasked: harmless, or with stated retries.

    Args:
        task: the task.
        tool: its tool, if the plan describes it.
        is_named: whether `on` of its retries names the error.
    """
    if is_repeatable(task, tool):
        return True
    if is_declared_unrepeatable(task, tool):
        return False
    if is_named:
        return True
    retry = stated_retry(task, tool)
    if retry is None or retry.on:
        return False
    return retry.states_attempts and retry.max_attempts > 1


def repetition_advice(task: TaskBody, tool: ToolSpec | None, *, done: bool = False) -> list[str]:
    """Return the declarations that would allow repeating a call without asking a person.

    Existing or useless ones are left out.

    Args:
        task: the task.
        tool: its tool, if the plan describes it.
        done: whether the call succeeded; retries only follow failures.
    """
    advice = [READING_ADVICE]
    if not is_repeatable(task, tool):
        advice.append("`idempotent: true` if a second call does no harm")
    if done:
        return advice
    if confirmation_of(task, tool) is None:
        advice.append(CONFIRM_ADVICE)
    if is_declared_unrepeatable(task, tool):
        return advice
    if not allows_repetition(task, tool, is_named=False):
        advice.append("`retry: {max_attempts: 3}` to have it repeated all the same")
    return advice


def for_another_tool(task: TaskBody) -> dict[str, object]:
    """Return a task's fields about its tool's effect, for another tool.

    Nobody has said of the other tool that it only reads, that its calls may be repeated, how they
    are confirmed, or how they are taken back. Of `retry`, the delays and `max_seconds` remain, and
    a limit to one attempt.
    """
    fields: dict[str, object] = {}
    if task.effect is not None:
        fields["effect"] = None
    if task.idempotent is not None:
        fields["idempotent"] = None
    if task.undo is not None:
        fields["undo"] = None
    if task.undo_on_replace is not None:
        fields["undo_on_replace"] = None
    if task.confirm is not None:
        fields["confirm"] = None
    if task.retry is not None:
        kept = {"delay", "backoff", "max_delay", "jitter", "max_seconds"}
        if task.retry.max_attempts == 1:
            kept.add("max_attempts")
        kept &= task.retry.model_fields_set
        fields["retry"] = None
        if kept:
            # A dump has a stated `max_attempts` in any case, which allows repetitions.
            fields["retry"] = Retry.model_validate(
                {name: getattr(task.retry, name) for name in kept}
            )
    return fields


def is_declared_unrepeatable(task: TaskBody, tool: ToolSpec | None) -> bool:
    """Return whether a task, or else its tool, says `idempotent: false`."""
    idempotent = task.idempotent
    if idempotent is None and tool is not None:
        idempotent = tool.idempotent
    return idempotent is False


CALL_FIELDS: Final = (
    "kind",
    "command",
    "method",
    "url",
    "headers",
    "body",
    "callable",
    "server",
    "tool",
    "cwd",
    "workspace",
    "env",
)
"""Fields of a tool that say what is called, how and where: its results depend on them."""

_ARGUMENT_KINDS: Final = frozenset(
    {"shell", "http", "python", "mcp", "function", "langchain", "langgraph", "participant"}
)
"""Kinds of tools that are called with arguments alone, so that the goal of a task changes nothing.

The work behind every other tool is given the whole task, as an agent is that reads what it is to
do.
"""


def reads_goal(tool: ToolSpec | None) -> bool:
    """Return whether a tool gets the goal of a task; an undescribed tool counts as one."""
    return tool is None or tool.kind not in _ARGUMENT_KINDS


def is_same_work(new: TaskBody, old: TaskBody, tool: ToolSpec | None) -> bool:
    """Return whether two tasks ask for the same work: the same arguments and goal.

    The goal counts where the tool of the new task is given it. A task that states no goal asks for
    nothing else.
    """
    if new.arguments != old.arguments:
        return False
    if new.goal is None or new.goal == old.goal:
        return True
    return not reads_goal(tool)


def is_same_call(new: TaskBody, old: TaskBody, tool: ToolSpec | None) -> bool:
    """Return whether a task asks the same tool for the same work; see `is_same_work`."""
    return new.tool == old.tool and is_same_work(new, old, tool)


def share_capability(one: str | None, other: str | None, tools: Mapping[str, ToolSpec]) -> bool:
    """Return whether two names are of the same tool, or of tools of the same capability."""
    if one == other:
        return True
    first = tools.get(one or "")
    second = tools.get(other or "")
    if first is None or second is None or first.capability is None:
        return False
    return first.capability == second.capability


def confirmation_problem(name: str, own: str | None, tools: Mapping[str, ToolSpec]) -> str:
    """Return why a tool cannot confirm the output of another one; empty if it can.

    Args:
        name: the tool that is to confirm it.
        own: the tool whose output it is.
        tools: the described tools by name.
    """
    second = tools.get(name)
    if second is None:
        return f"there is no tool {name!r}"
    if not share_capability(own, name, tools):
        return f"{name!r} and {own!r} do not have the same `capability`"
    if second.dangerous:
        return f"{name!r} is `dangerous`, and would be used without asking a person"
    # Its calls are made beside those of the plan, and must not change anything.
    if not has_no_effect(TaskBody(), second):
        return f"{name!r} may change something; state {READING_ADVICE}"
    return ""


def _http_method(tool: ToolSpec) -> str:
    return (tool.method or "GET").upper()


_NOTE_FIELDS: Final = frozenset({"phase", "by", "tool"})


def program_note(task: TaskBody) -> JsonObject:
    """Return the note that the program which executes the run left on a task; empty without one.

    Such a program may make its own tasks, and choose their tools when they begin. A note is an
    object in the metadata that names the `phase` of the program which the task carries out, the
    task `by` which it was planned, or the intended `tool`. Viewers show the `phase` or the `name`
    in it instead of the id, and the `tool` and `arguments` in it while the task names no tool.
    """
    for value in task.metadata.values():
        if isinstance(value, dict) and not _NOTE_FIELDS.isdisjoint(value):
            return value
    return {}


def tool_name(task: TaskBody) -> str:
    """Return the tool of a task, or the one that its program intends; empty if it has none."""
    return task.tool or str(program_note(task).get("tool") or "")


_ELEMENTS_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [
        {"type": "array"},
        {"type": "object"},
        {"type": "string", "pattern": r"^\$\{.+\}$"},
        {"type": "null"},
    ]
}


def _check_for_each(value: JsonValue) -> JsonValue:
    if isinstance(value, list | dict | None):
        return value
    if isinstance(value, str) and is_one_reference(value):
        return value
    raise ValueError("expected a list, a mapping, or a reference such as ${list.output}")


def _check_key(value: str | None) -> str | None:
    if value is not None:
        problem = root_reference_problem(value, KEY_ROOTS)
        if problem:
            raise ValueError(problem)
    return value


# Fields about the elements of a list, which tasks have, and actions that a model plans.
ForEach = Annotated[
    JsonValue,
    AfterValidator(_check_for_each),
    WithJsonSchema(_ELEMENTS_SCHEMA),
    Field(
        description=(
            "A list or mapping, or a reference to one: once it is known, the task "
            "becomes one task for each element."
        )
    ),
]
ElementKey = Annotated[
    str | None,
    AfterValidator(_check_key),
    Field(
        description=(
            "Names the task of an element: with ${item.id}, it is called TASK[id] and not TASK[0]."
        )
    ),
]
MaxItems = Annotated[
    int,
    Field(strict=True, ge=1, description="With more elements than this, the task fails."),
]
MaxParallel = Annotated[
    Annotated[int, Field(strict=True, ge=1)] | None,
    Field(description="How many elements run at the same time; unlimited by default."),
]
OnItemFailure = Annotated[
    Literal["fail", "skip"],
    Field(
        description=(
            "skip: an element that fails for good has the output null, and the rest goes on."
        )
    ),
]


class Task(TaskBody):
    """One step of a plan."""

    # So that a document has `with`, which cannot be the name of an attribute in Python.
    model_config = ConfigDict(serialize_by_alias=True, populate_by_name=True)

    id: Id = Field(description="Unique in the plan, and never used again for another task.")
    depends_on: Items[Id] = Field(
        default=(), description="The tasks that must be done (or skipped) before."
    )
    run_if: Literal["always"] | None = Field(
        default=None,
        description="`always`: runs once all that it depends on has ended, in whatever way.",
    )
    undoes: Name | None = Field(
        default=None,
        description=(
            "The attempt whose effect it takes back, such as pay#1; `replanning undo` sets it."
        ),
    )
    for_each: ForEach = None
    key: ElementKey = None
    max_items: MaxItems = 1000
    max_parallel: MaxParallel = None
    on_item_failure: OnItemFailure = "fail"
    include: IncludedPlan | None = Field(
        default=None,
        description=(
            "A plan file, from the folder of this one: its tasks are carried out in the "
            "place of this task."
        ),
    )
    with_: JsonObject | None = Field(
        default=None,
        alias="with",
        description="Values of the parameters of the included plan; may hold what arguments may.",
    )
    outputs: JsonObject | None = Field(
        default=None,
        description=(
            "The result of an included plan, of ${task.output} of its tasks; by default "
            "that of its last task."
        ),
    )
    scope: JsonObject | None = Field(
        default=None,
        description=(
            "Values of ${item}, ${index}, ${key} and ${parameters.name} in this task; "
            "`for_each` and `include` set it."
        ),
    )


def _kind_of_inclusion(value: object) -> str:
    return "[file]" if isinstance(value, str) else "[plan]"


class SubPlan(StrictModel):
    """Tasks of a plan that is executed in place of one task, with its own values."""

    source: str = Field(default="", description="The file that it was read from.")
    parameters: JsonObject = Field(
        default_factory=dict, description="As `parameters` of a plan: what `with` gives values of."
    )
    tasks: Items[Task] = Field(description="As `tasks` of a plan; they refer to one another.")


IncludedPlan = Annotated[
    Annotated[str, Tag("[file]")] | Annotated[SubPlan, Tag("[plan]")],
    Discriminator(_kind_of_inclusion),
]
Task.model_rebuild()

_set: Final = object.__setattr__  # a task is immutable


def with_arguments(task: Task, arguments: JsonObject) -> Task:
    """Return a copy of a task with other arguments."""
    return with_fields(task, {"arguments": arguments}, task.model_fields_set)


def with_fields(task: Task, fields: Mapping[str, Any], stated: set[str]) -> Task:
    """Return a copy of a task with other fields, whose values are right.

    Every task is handed out as such a copy, and those of a list are such copies of one.
    `model_copy` takes more than twice as long, and gives each copy a set of its own of the names
    that are stated: memory that the benchmark `lists` counts.

    Args:
        task: the task.
        fields: the values of the other fields.
        stated: the names of the fields that are stated, which many copies may share.
    """
    copied = Task.__new__(Task)
    _set(copied, "__dict__", {**task.__dict__, **fields})
    _set(copied, "__pydantic_fields_set__", stated)
    _set(copied, "__pydantic_extra__", None)
    _set(copied, "__pydantic_private__", None)
    return copied
