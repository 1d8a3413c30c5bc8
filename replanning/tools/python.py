"""Tools of kind `python`: functions of the user."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Final

import anyio
from pydantic import JsonValue

from replanning.plan.messages import did_you_mean, join_parts
from replanning.run.attempt import TaskContext, run_in_thread
from replanning.run.outputs import return_type_of
from replanning.tools.call import ToolCall
from replanning.tools.errors import InvalidArguments, InvalidTool, ToolUnavailable

Function = Callable[..., object]
_MAX_THREADS: Final = 40


class PythonToolRunner:
    """Runner of Python functions: asynchronous ones directly, others in a thread.

    A thread cannot be stopped. When the task of a synchronous function is cancelled or times out,
    the function runs on to its end, its result is dropped, and it counts among the 40 that may run
    at once. Work that must be stopped belongs in an asynchronous function or a command.
    """

    # Its own limit, so that functions that never end do not starve the rest of the program.
    _threads: anyio.CapacityLimiter | None = None

    async def __call__(self, call: ToolCall) -> JsonValue:
        """Call the function of a tool with the arguments of the task as keywords.

        It also receives the context of the task if it has a parameter `context`.

        Returns:
            What the function returns.

        Raises:
            InvalidTool: the definition names no function.
            InvalidArguments: the function does not take these arguments.
            ToolUnavailable: the module or the function in it cannot be imported.
            Exception: whatever the function raises.
        """
        if problems := callable_problems(call.tool.callable):
            raise InvalidTool(call.tool.name, problems)
        if self._threads is None:
            self._threads = anyio.CapacityLimiter(_MAX_THREADS)
        in_thread = partial(run_in_thread, limiter=self._threads)
        function = await in_thread(partial(load_callable, call.tool.name, call.tool.callable or ""))
        work = partial(function, **_bound_arguments(call, function))
        # An object may have an asynchronous method `__call__`.
        is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        result = work() if is_async else await in_thread(work)
        if inspect.isawaitable(result):
            result = await result
        if isinstance(call.context, TaskContext):
            # The annotation determines how the run stores a result that is not JSON.
            return_types = call.context._run._lifecycle.outputs.return_types
            if call.tool.name not in return_types:
                return_type = return_type_of(function)
                if return_type is not None:
                    return_types[call.tool.name] = return_type
        return result  # type: ignore[return-value] # the run encodes what is not JSON


def _bound_arguments(call: ToolCall, function: Function) -> dict[str, object]:
    """Return the keywords for a function.

    Raises:
        InvalidArguments: the function does not take them.
    """
    arguments: dict[str, object] = dict(call.arguments)
    try:
        signature = inspect.signature(function)
    except ValueError:
        # It is written in C and has no signature, so it checks its arguments itself.
        return arguments
    if "context" in signature.parameters:
        arguments.setdefault("context", call.context)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        declared = f"{call.tool.callable}{signature}"
        problem = f"{error}; it is {declared}, the task gives {list(call.arguments)}"
        raise InvalidArguments(call.tool.name, [problem]) from None
    return arguments


def callable_problems(name: str | None) -> list[str]:
    """Return the problems of a `callable`."""
    if name is None:
        return ["its kind is 'python', so it needs a `callable`"]
    module, _, function = name.partition(":")
    # An empty part is not an identifier, so this also requires the colon.
    parts = [*module.split("."), *function.split(".")]
    if not all(map(str.isidentifier, parts)):
        return [f"its callable {name!r} is not of the form 'package.module:function'"]
    return []


def load_callable(tool: str, name: str) -> Function:
    """Return the function that `package.module:function` names.

    Raises:
        ToolUnavailable: the module cannot be imported, or has no such function.
    """
    module_name, _, path = name.partition(":")
    try:
        found: object = import_module(module_name)
    except ModuleNotFoundError as error:
        missing = f"the module {error.name!r}"
        advice = "which is not found; install it, or put its folder on PYTHONPATH"
        raise ToolUnavailable(tool, missing, advice) from error
    except Exception as error:
        # Code of the user runs here, and may fail in any way.
        advice = f"which fails on import: {type(error).__name__}: {error}"
        raise ToolUnavailable(tool, f"the module {module_name!r}", advice) from error
    needed = f"the function {path!r} of the module {module_name!r}"
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            public = [each for each in dir(found) if not each.startswith("_")]
            hint = did_you_mean(attribute, public)
            raise ToolUnavailable(tool, needed, join_parts("which has no such name", hint))
        found = getattr(found, attribute)
    if not callable(found):
        raise ToolUnavailable(tool, needed, "which cannot be called")
    return found
