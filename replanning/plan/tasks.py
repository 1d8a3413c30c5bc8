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

# Names appear in messages, where a blank at either end or a line break would be invisible.
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


# Strict, so that a quoted number is reported as a mistake.
NonNegativeFloat = Annotated[float, Field(strict=True, ge=0)]
Duration = Annotated[float, Field(strict=True, ge=0), BeforeValidator(to_seconds)]
Seconds = Annotated[float, Field(strict=True, gt=0), BeforeValidator(to_seconds)]
NonNegativeInt = Annotated[int, Field(strict=True, ge=0)]
StrictInt = Annotated[int, Field(strict=True)]
StrictBool = Annotated[bool, Field(strict=True)]


T = TypeVar("T")


class _AsTuple:
    """Validation of a sequence as a tuple."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(GenericAlias(tuple, (get_args(source)[0], ...)))


Items = Annotated[Sequence[T], _AsTuple]
"""Field that takes a list or tuple and holds a tuple."""


class StrictModel(BaseModel):
    """Base of the parts of a plan: immutable, without unknown fields.

    Raises:
        PlanError: a field is wrong or unknown; lists every one, with the nearest known field.
    """

    # A misspelt field would otherwise be ignored silently.
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

        # Pydantic then validates the parts of a document without calling this for each.
        __init__.__pydantic_base_init__ = True

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
            "Environment variables in addition to PATH, HOME and the like; {env:NAME} is "
            "looked up at the start."
        ),
    )
    url: str | None = Field(
        default=None, description="The address of a running server (streamable HTTP)."
    )
    headers: Mapping[str, str] = Field(
        default_factory=dict, description="Request headers; {env:NAME} is looked up at the start."
    )
    tools: Items[Name] | None = Field(
        default=None,
        description="Tools of the server that may be used; all by default.",
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
        """Return the problems that make it unusable on any machine."""
        # Returned instead of raised, so that one error can list the problems of all servers.
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
        found += [f"`{name}` does not apply to it" for name in idle]
        allowed = frozenset(self.safe if self.tools is None else self.tools)
        strange = [name for name in self.safe if name not in allowed]
        if strange:
            found.append(f"{strange} under `safe` are not among its `tools`")
        return found


class Goal(StrictModel):
    """Goal of the plan."""

    objective: Text = Field(description="The aim, in words.")
    success_criteria: Items[Text] = Field(
        default=(), description="How a person can tell that it was achieved."
    )
    facts: Items[Fact] = Field(default=(), description="Facts that must hold at the end.")
    stop_when_reached: StrictBool = Field(
        default=False,
        description="Succeed as soon as all facts of the goal hold, regardless of task states.",
    )

    def with_fields(self, fields: Mapping[str, object]) -> Goal:
        """Return the goal with some fields replaced.

        Raises:
            PlanError: the result is not a valid goal; lists every problem.
        """
        # `model_copy` does not validate, and the fields may come from a message.
        return Goal.model_validate({**self.model_dump(), **fields})


_CLASS_PATTERN: Final = r"^[^\W\d]\w*(\.[^\W\d]\w*)*$"


TIMEOUT: Final = "timeout"
"""Entry of `on` in `Retry` for every time limit: of the task, of its tool, and of clients."""

EXIT_CODES: Final = range(1, 256)
ERROR_STATUSES: Final = range(400, 600)
"""HTTP error statuses; exit codes are smaller."""


def _check_retryable(value: object) -> object:
    match value:
        case str() if re.match(_CLASS_PATTERN, value):
            return value
        case bool():
            pass
        case int() if value in EXIT_CODES or value in ERROR_STATUSES:
            return value
    raise ValueError(
        "expected an exception class such as httpx.ReadTimeout, an exit code from 1 to 255, "
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
"""Limit of the exponent: the delay has reached its maximum by then, and fits in a float."""

_MAX_COUNTED_ATTEMPTS: Final = 10**15
"""Limit of attempts in a sum of delays, which then fits in a float."""


class Retry(StrictModel):
    """Attempts at a task: number, delays, and the failures that are retried.

    With a stated `max_attempts`, every failure is retried, or every failure under `on`. Without it,
    temporary failures and those under `on` are retried. If a failed attempt may have had its
    effect, `idempotent: false` forbids both.
    """

    max_attempts: Annotated[int, Field(strict=True, ge=1)] = Field(
        default=3,
        description="Number of attempts, the first included; if stated without `on`, after any failure.",
    )
    delay: Duration = Field(default=1.0, description="Seconds before the second attempt.")
    backoff: Literal["exponential", "constant"] = Field(
        default="exponential",
        description="exponential: the delay doubles after each attempt; constant: it does not.",
    )
    exponential: Annotated[StrictBool | None, WithJsonSchema({"type": "boolean"})] = Field(
        default=None,
        description=("Earlier spelling of `backoff`: true for exponential, false for constant."),
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
            "Seconds from the start of the first attempt, after which no other attempt begins."
        ),
    )
    on: Items[Retryable] | None = Field(
        default=None,
        description=(
            "The failures to retry: exception classes (httpx.ReadTimeout), HTTP statuses, "
            "exit codes, timeout."
        ),
    )

    @property
    def states_attempts(self) -> bool:
        """Whether `max_attempts` was stated."""
        return "max_attempts" in self.model_fields_set

    @property
    def names_timeouts(self) -> bool:
        """Whether `on` contains reaching the time limit."""
        if self.on is None:
            return False
        return TIMEOUT in self.on

    @property
    def longest_wait(self) -> float:
        """Upper bound of the sum of all delays, in seconds."""
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
        """Return the maximum time from the start of the first attempt to the end of the last.

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
            chance: a random number from 0 to 1; with `jitter`, it varies the delay by up to a half
                in either direction, and 0.5 leaves it unchanged.
        """
        delay = self.delay
        if self.backoff == "exponential":
            delay *= 2 ** min(attempts - 1, _MAX_DOUBLINGS)
        # Tasks that failed together would otherwise all retry a recovering service at once.
        if self.jitter:
            delay *= 0.5 + chance
        longest = self.max_delay
        if longest is None:
            longest = max(self.delay, _DEFAULT_MAX_DELAY)
        return min(delay, longest)

    @model_validator(mode="before")
    @classmethod
    def _read_exponential(cls, fields: object) -> object:
        """Read `exponential` as `backoff`, so that either spelling gives an equal plan."""
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
        # Journals omit defaults, but a stated default differs from an omitted one.
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
        description="Seconds; time spent waiting only for a person does not count.",
    )


ChangingEffect = Literal["reversible", "partly", "irreversible"]
"""Effect that changes something, by its reversibility."""

Effect = Literal["none", ChangingEffect]
"""Effect of a tool or a task; `none`: it only reads."""


def _checked_condition(condition: str) -> str:
    """Return a condition on an output if it is valid."""
    try:
        Condition.parse(condition, OUTPUT_ROOTS)
    except ExpressionError as error:
        raise ValueError(str(error)) from None
    return condition


def _checked_path(path: str) -> str:
    """Return a path into an output if it is valid."""
    if path.startswith(("output.", "output[")):
        inner = path.removeprefix("output").removeprefix(".")
        own = f'["output"]{path.removeprefix("output")}'
        raise ValueError(
            f"{path!r} starts with `output`, but paths begin inside the output: write {inner!r}, "
            f"or {own!r} for a field called output"
        )
    try:
        output_lookup(path)
    except ExpressionError as error:
        raise ValueError(str(error)) from None
    return path


OutputPath = Annotated[str, AfterValidator(_checked_path)]


class Agreement(StrictModel):
    """Second tool that must give the same output for the same arguments."""

    tool: Name = Field(description="The tool to ask: of the same capability, and read-only.")
    fields: Items[OutputPath] | None = Field(
        default=None,
        description="Paths into the output to compare: json.total; by default all of it.",
    )
    tolerance: NonNegativeFloat = Field(
        default=0.0, description="Largest difference between two numbers, in their own unit."
    )

    @model_validator(mode="before")
    @classmethod
    def _read_name(cls, stated: object) -> object:
        """Read the name of a tool as an agreement on whole outputs."""
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
        description="Texts that report a failure: their beginnings, or patterns with *.",
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
        default=None, description="Second tool to call, which must give the same output."
    )

    @property
    def second_tool(self) -> str:
        """The tool that must give the same output; empty without one."""
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
            raise ValueError("`means` needs `errors`, which are missing")
        return self

    @model_serializer(mode="wrap")
    def _by_alias(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        if "json_schema" in fields:
            fields["schema"] = fields.pop("json_schema")
        return fields


WHOLE_OUTPUT: Final = "${output}"
"""Default output of a confirmed task: the output of the asked tool."""

DONE_UNLESS_NULL: Final = "output != null"
"""Condition of a confirmation by a function that returns the output of the call, or None."""


class Confirmation(StrictModel):
    """Read-only call that tells whether a call without an answer was executed after all."""

    tool: Name = Field(description="The tool to ask; it must be read-only.")
    arguments: JsonObject = Field(
        default_factory=dict,
        description=(
            "Its arguments; may contain ${arguments.name}, ${results.task}, "
            "${context.name}, ${parameters.name} and ${idempotency_key}."
        ),
    )
    when: Annotated[str, AfterValidator(_checked_condition)] = Field(
        description=(
            "Condition that its output satisfies if the call was executed; see `expect.where`."
        )
    )
    output: JsonValue = Field(
        default=WHOLE_OUTPUT,
        description=(
            "The output of the task if the call was executed; by default, that of the asked tool."
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
    """Return the fact, or pattern of facts, of a name in `needs` or `produces`."""
    return f"artifact({name})"


class Undo(StrictModel):
    """Call that undoes the effect of another call."""

    tool: Name = Field(description="The tool that undoes it.")
    arguments: JsonObject = Field(
        default_factory=dict,
        description=(
            "Its arguments; may contain ${output.name}, ${arguments.name}, "
            "${results.task}, ${context.name}, ${parameters.name} and ${item.name}."
        ),
    )


class ToolSpec(StrictModel):
    """Description of a tool that executes tasks, for executors and planners."""

    name: Name = Field(description="The name that tasks use.")
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
        description="Exit codes other than 0, or HTTP statuses, that are results, not failures.",
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
        description="Whether its effect is undone before another call replaces it.",
    )
    idempotent: StrictBool | None = Field(
        default=None, description="Whether running it twice does no more than running it once."
    )
    command: str | None = Field(
        default=None, description="shell: the command line; {name} is the argument, as one word."
    )
    method: Name | None = Field(default=None, description="http: the request method.")
    url: str | None = Field(default=None, description="http: the address; {name} is the argument.")
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
        description="mcp: JSON Schema of the arguments; by default, the server is asked for it.",
    )
    cwd: str | None = Field(default=None, description="Working directory.")
    workspace: str | None = Field(
        default=None,
        description=(
            "The only directory in which paths are accepted; with bubblewrap, also the "
            "only one that a command can write to."
        ),
    )
    env: Mapping[str, str] = Field(
        default_factory=dict,
        description="Environment variables; {env:NAME} is looked up when the tool is run.",
    )
    timeout: Seconds | None = Field(
        default=None, description="Timeout in seconds, unless the task has one."
    )
    retry: Retry | None = Field(
        default=None,
        description=(
            "How often it is tried, and after which failures, unless the task states its own."
        ),
    )
    expect: Expectation | None = Field(
        default=None, description="Expectations of its output; if violated, the attempt fails."
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
        """The texts of its call that may contain placeholders."""
        texts = list(self.headers.values())
        if self.body is not None:
            texts += iter_strings(self.body, keys=False)
        for text in (self.command, self.url):
            if text:
                texts.append(text)
        return tuple(texts)

    @property
    def parameter_types(self) -> Mapping[str, str]:
        """Its parameters with their types; without declared ones, the placeholders in its texts."""
        if self.parameters:
            return self.parameters
        types: dict[str, str] = {}
        for text in (*self.fact_patterns, *self.filled_texts):
            types.update(dict.fromkeys(placeholders(text), "any"))
        types.pop(IDEMPOTENCY_KEY, None)  # filled in by the executor
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
                text = f"tool {self.name!r}: {pattern!r} needs the arguments {lacking}, got {list(arguments)}"
                raise PlanError.at("", text)
            filled = fill_placeholders(pattern, {name: as_text(arguments[name]) for name in names})
            # A pattern without placeholders was normalised by validation.
            facts.append(normalise_fact(filled) if names else filled)
        return tuple(facts)


OnStale = Literal["ignore", "warn", "redo"]


class TaskBody(StrictModel):
    """Fields of tasks and fallbacks."""

    name: Text | None = Field(
        default=None, description="Display name; with `for_each`, may contain ${item}."
    )
    tool: Name | None = Field(default=None, description="The tool that executes it.")
    arguments: JsonObject = Field(
        default_factory=dict,
        description=(
            "Arguments of the tool; may contain ${task.output}, ${context.name}, "
            "${parameters.name}, and with `for_each` ${item}, ${index} and ${key}."
        ),
    )
    goal: Text | None = Field(
        default=None, description="The purpose of the task; with `for_each`, may contain ${item}."
    )
    priority: StrictInt = Field(
        default=0,
        description="Ready tasks with a lower number run earlier; ties in the plan's order.",
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
            "A condition over context.*, parameters.*, results.* and status.*; if false, "
            "the task is skipped. With `for_each`, one over item, index or key skips elements."
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
    fallbacks: Items[Fallback] = Field(
        default=(),
        description="Its substitutes, best first; taken without asking, even if the task may have"
        " taken effect.",
    )
    undo: Fallback | None = Field(
        default=None, description="Its compensating action; by default that of its tool."
    )
    undo_on_replace: StrictBool | None = Field(
        default=None,
        description=(
            "Whether its effect is undone before another call replaces it; by default as its tool "
            "says."
        ),
    )
    acceptance: Items[Text] = Field(
        default=(),
        description="How a person or a model can tell that it was done well, in words.",
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
        """The commands that must succeed after the task (`expect.commands`)."""
        return () if self.expect is None else self.expect.commands

    @property
    def lasting_expectation(self) -> Expectation:
        """Expectations that a substitute keeps: the commands, and nothing about the output."""
        return Expectation(commands=self.commands)


class Fallback(TaskBody):
    """Task without an id that may replace the task declaring it."""


READING_METHODS: Final = ("GET", "HEAD", "OPTIONS")
"""HTTP methods that change nothing."""


# Declarations that allow repeating a call, and giving it to another tool.
READING_ADVICE: Final = "`effect: none` if it only reads"
CONFIRM_ADVICE: Final = "`confirm` if another tool can tell whether it was done"


def effect_of(task: TaskBody, tool: ToolSpec | None) -> Effect | None:
    """Return the declared effect of a task, or else of its tool; None if unknown."""
    if task.effect is not None:
        return task.effect
    if tool is None:
        return None
    # An author who states `idempotent` for a GET knows better than its method.
    is_undeclared = tool.effect is None and tool.idempotent is None
    if is_undeclared and tool.kind == "http" and _http_method(tool) in READING_METHODS:
        return "none"
    return tool.effect


def has_no_effect(task: TaskBody, tool: ToolSpec | None) -> bool:
    """Return whether a task only reads; its own declaration overrides that of its tool."""
    return effect_of(task, tool) == "none"


def is_undone_on_replace(task: TaskBody, tool: ToolSpec | None) -> bool:
    """Return whether the effect of a task is undone before another call replaces it."""
    if task.undo_on_replace is not None:
        return task.undo_on_replace
    return tool is not None and tool.undo_on_replace


def is_repeatable(task: TaskBody, tool: ToolSpec | None) -> bool:
    """Return whether running a task twice does no more than once: it only reads, or is idempotent.

    Declarations of the task about effect or idempotence override those of its tool.
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
    # RFC 9110 defines these methods as idempotent.
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
    """Return why a tool cannot be asked whether a call was executed; empty if it can."""
    if tool.dangerous:
        return f"{tool.name!r} is `dangerous`, and would be used without asking a person"
    # It is called without asking anybody, so it must not change anything.
    if not has_no_effect(TaskBody(), tool):
        return f"{tool.name!r} may change something; state {READING_ADVICE}"
    return ""


def stated_retry(task: TaskBody, tool: ToolSpec | None) -> Retry | None:
    """Return the declared retries of a task, or else of its tool."""
    if task.retry is None and tool is not None:
        return tool.retry
    return task.retry


def allows_repetition(task: TaskBody, tool: ToolSpec | None, *, is_named: bool) -> bool:
    """Return whether a call in doubt is repeated without asking: harmless, or declared retries.

    Args:
        task: the task.
        tool: its tool, if the plan describes it.
        is_named: whether `on` of its retries matches the error.
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
    """Return the missing declarations that would allow repeating a call without asking a person.

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
        advice.append("`retry: {max_attempts: 3}` to have it repeated anyway")
    return advice


def for_another_tool(task: TaskBody) -> dict[str, object]:
    """Return the changes of a task's fields that describe its tool's effect, for another tool.

    These declarations are about the original tool: the other one may change something, or need
    another confirmation or undo. `retry` keeps its delays, `max_seconds`, and a limit of one
    attempt.
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
            # Not from a dump, which always contains a stated `max_attempts`.
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
"""Fields of a tool that define its call, and thereby its results."""

_ARGUMENT_KINDS: Final = frozenset(
    {"shell", "http", "python", "mcp", "function", "langchain", "langgraph", "participant"}
)
"""Kinds of tools that get only the arguments, so that the goal of a task does not matter.

Every other tool, such as an agent, gets the whole task.
"""


def reads_goal(tool: ToolSpec | None) -> bool:
    """Return whether a tool gets the goal of a task; true for an undescribed tool."""
    return tool is None or tool.kind not in _ARGUMENT_KINDS


def is_same_work(new: TaskBody, old: TaskBody, tool: ToolSpec | None) -> bool:
    """Return whether two tasks ask for the same work: the same arguments and goal.

    The goal counts only if the new task states one, and its tool gets the goal.
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
    """Return whether two names belong to one tool, or to tools with the same capability."""
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
        name: the confirming tool.
        own: the tool that returned the output.
        tools: the described tools by name.
    """
    second = tools.get(name)
    if second is None:
        return f"there is no tool {name!r}"
    if not share_capability(own, name, tools):
        return f"{name!r} and {own!r} do not have the same `capability`"
    if second.dangerous:
        return f"{name!r} is `dangerous`, and would be used without asking a person"
    # It is called in addition to the tools of the plan, so it must not change anything.
    if not has_no_effect(TaskBody(), second):
        return f"{name!r} may change something; state {READING_ADVICE}"
    return ""


def _http_method(tool: ToolSpec) -> str:
    return (tool.method or "GET").upper()


_NOTE_FIELDS: Final = frozenset({"phase", "by", "tool"})


def program_note(task: TaskBody) -> JsonObject:
    """Return the note on a task by the program that executes the run; empty without one.

    Such a program may create its own tasks, and choose their tools when they start. A note is an
    object in the metadata with at least one of these keys: `phase` (of the program), `by` (the task
    that planned this one) and `tool` (the intended tool). Viewers show its `phase` or `name`
    instead of the id, and its `tool` and `arguments` while the task has no tool.
    """
    for value in task.metadata.values():
        if isinstance(value, dict) and not _NOTE_FIELDS.isdisjoint(value):
            return value
    return {}


def tool_name(task: TaskBody) -> str:
    """Return the tool of a task, or the tool intended in its note; empty without either."""
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


# Fields about the elements of a list, for tasks and for actions planned by a model.
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
            "Key in the id of an element's task: with ${item.id}, TASK[id] instead of TASK[0]."
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
            "skip: an element that fails for good has the output null, and the others continue."
        )
    ),
]


class Task(TaskBody):
    """One step of a plan."""

    # For the field `with`, which cannot be an attribute name in Python.
    model_config = ConfigDict(serialize_by_alias=True, populate_by_name=True)

    id: Id = Field(description="Unique in the plan, and never used again for another task.")
    depends_on: Items[Id] = Field(
        default=(), description="The tasks that must be done (or skipped) before."
    )
    run_if: Literal["always"] | None = Field(
        default=None,
        description="`always`: runs once all of its dependencies have ended, even by failing.",
    )
    undoes: Name | None = Field(
        default=None,
        description=(
            "The attempt whose effect it undoes, such as pay#1; set by `replanning undo`."
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
            "A plan file, relative to the folder of this one: its tasks run in place of this task."
        ),
    )
    with_: JsonObject | None = Field(
        default=None,
        alias="with",
        description="Parameter values for the included plan; references as in `arguments`.",
    )
    outputs: JsonObject | None = Field(
        default=None,
        description=(
            "The output of an included plan, made of ${task.output} of its tasks; by default "
            "that of its last task."
        ),
    )
    scope: JsonObject | None = Field(
        default=None,
        description=(
            "Values of ${item}, ${index}, ${key} and ${parameters.name} in this task; "
            "set by `for_each` and `include`."
        ),
    )


def _kind_of_inclusion(value: object) -> str:
    return "[file]" if isinstance(value, str) else "[plan]"


class SubPlan(StrictModel):
    """Included plan: its tasks run in place of one task, with their own parameters."""

    source: str = Field(default="", description="The file that it was read from.")
    parameters: JsonObject = Field(
        default_factory=dict, description="As `parameters` of a plan; `with` passes their values."
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
    return with_fields(task, {"arguments": arguments}, task.__pydantic_fields_set__)


def with_fields(task: Task, fields: Mapping[str, Any], stated: set[str]) -> Task:
    """Return a copy of a task with some fields replaced by valid values.

    Every task is handed out as such a copy, and the tasks of a list are copies of one template.
    `model_copy` is slower, and gives each copy its own set of stated field names: memory that the
    benchmark `lists` measures.

    Args:
        task: the task.
        fields: the new values.
        stated: the names of the stated fields, a set that many copies may share.
    """
    copied = Task.__new__(Task)
    values = task.__dict__.copy()
    values.update(fields)
    _set(copied, "__dict__", values)
    _set(copied, "__pydantic_fields_set__", stated)
    _set(copied, "__pydantic_extra__", None)
    _set(copied, "__pydantic_private__", None)
    return copied
