"""Tools of kind `python`: functions of the user."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Final

import anyio
from pydantic import JsonValue

from replanning.plan.messages import did_you_mean
from replanning.run.attempt import TaskContext, run_in_thread
from replanning.run.outputs import return_type_of
from replanning.tools.call import ToolCall
from replanning.tools.errors import InvalidArguments, InvalidTool, ToolUnavailable

Function = Callable[..., object]
_MAX_THREADS: Final = 40


class PythonToolRunner:
    """Runner of Python functions: asynchronous ones directly, others in a thread.

    A thread cannot be stopped. When the task of a function that is not asynchronous is cancelled,
    or times out, nobody waits for the function any longer and its result is dropped, but it runs on
    to its end, and counts among the 40 that may run at once. Work that must be stopped belongs into
    an asynchronous function or a command.
    """

    # Threads of its own, so that functions that never end do not starve the rest of the program.
    _threads: anyio.CapacityLimiter | None = None

    async def __call__(self, call: ToolCall) -> JsonValue:
        """Call the function of a tool with the arguments of the task as keywords.

        It receives `context`, the context of the task, where it has a parameter of that name.

        Returns:
            What the function returns.

        Raises:
            InvalidTool: the description names no function.
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
        arguments: dict[str, object] = dict(call.arguments)
        try:
            signature = inspect.signature(function)
        except ValueError:  # written in C, without a signature: it must check for itself
            pass
        else:
            if "context" in signature.parameters:
                arguments.setdefault("context", call.context)
            try:
                signature.bind(**arguments)
            except TypeError as error:
                problem = f"{error}; it is {call.tool.callable}{signature}, given are {list(call.arguments)}"
                raise InvalidArguments(call.tool.name, [problem]) from None
        work = partial(function, **arguments)
        is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        result = work() if is_async else await in_thread(work)
        if inspect.isawaitable(result):
            result = await result
        if isinstance(call.context, TaskContext):
            # The annotation says how the run stores a result that is no JSON.
            return_types = call.context._run._lifecycle.outputs.return_types
            if call.tool.name not in return_types:
                return_type = return_type_of(function)
                if return_type is not None:
                    return_types[call.tool.name] = return_type
        return result  # type: ignore[return-value] # what is no JSON meets the codec of the run


def callable_problems(name: str | None) -> list[str]:
    """Return the problems of the name of a function."""
    if name is None:
        return ["its kind is 'python', so it needs a `callable`"]
    module, colon, function = name.partition(":")
    if not colon or not all(
        part.isidentifier() for part in [*module.split("."), *function.split(".")]
    ):
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
        raise ToolUnavailable(
            tool, missing, "which is not found; install it, or put its folder on PYTHONPATH"
        ) from error
    except Exception as error:  # code of the user runs here, and may fail in any way
        advice = f"which fails when it is imported: {type(error).__name__}: {error}"
        raise ToolUnavailable(tool, f"the module {module_name!r}", advice) from error
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            hint = did_you_mean(
                attribute, [name for name in dir(found) if not name.startswith("_")]
            )
            advice = "; ".join(filter(None, ["which has no such name", hint]))
            raise ToolUnavailable(
                tool, f"the function {path!r} of the module {module_name!r}", advice
            )
        found = getattr(found, attribute)
    if not callable(found):
        raise ToolUnavailable(
            tool, f"the function {path!r} of the module {module_name!r}", "which cannot be called"
        )
    return found
