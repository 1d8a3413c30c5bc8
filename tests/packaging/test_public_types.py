"""What tools find out about the public classes at run time: validators, dependency injection, generators of documentation."""

import inspect
import pkgutil
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from typing import get_type_hints

import pytest
from pydantic import TypeAdapter

import replanning
from replanning import Alternative, Answer, Budget, Question, Retry, RunResult, Task, ToolSpec
from replanning.changes import RetryTask, SkipTask
from replanning.errors import ReplanningError
from replanning.settings import Settings, TimeoutSettings

FAMILIES = {"exporters", "providers", "triggers"}


def modules() -> Iterator[str]:
    """Yield the public modules: those at the top, whose packages are their faces, and the plugins of the families."""
    yield "replanning"
    for module in pkgutil.walk_packages(replanning.__path__, "replanning."):
        parts = module.name.split(".")[1:]
        if not any(part.startswith("_") for part in parts) and (
            len(parts) == 1 or parts[0] in FAMILIES
        ):
            yield module.name


@pytest.mark.parametrize("name", list(modules()))
def test_public_classes(name):
    """The hints of every public class can be evaluated."""
    module = import_module(name)
    exported = getattr(module, "__all__", ())
    for each in exported or [each for each in vars(module) if each[0] != "_"]:
        cls = getattr(module, each)
        if inspect.isclass(cls) and each[0] != "_" and cls.__module__.startswith("replanning"):
            assert (
                get_type_hints(cls, include_extras=True).keys()
                >= inspect.get_annotations(cls).keys()
            ), cls


def test_validation():
    """Public data classes can be parts of what pydantic reads."""
    answer = TypeAdapter(Answer).validate_python(
        {"verdict": "modify", "changes": [{"kind": "skip", "task_id": "a"}], "by": "ada"}
    )
    assert answer == Answer("modify", by="ada", changes=(SkipTask(task_id="a"),))
    for cls in (Question, RunResult):
        assert TypeAdapter(cls).json_schema()["title"] == cls.__name__


@pytest.mark.parametrize(
    ("model", "field", "others"),
    [
        (Task, "timeout", {"id": "a"}),
        (ToolSpec, "timeout", {"name": "t"}),
        (Retry, "delay", {}),
        (Budget, "wall_clock", {}),
        (RetryTask, "delay", {"task_id": "a"}),
        (Alternative, "expected_duration", {"changes": [], "reason": "r", "source": "s"}),
        (Settings, "cooldown", {}),
        (TimeoutSettings, "replan", {}),
    ],
)
def test_durations(model, field, others):
    """A duration is a number of seconds or a `timedelta`, and is kept in seconds."""
    assert getattr(model.model_validate({**others, field: timedelta(minutes=1.5)}), field) == 90.0
    with pytest.raises((ValueError, ReplanningError), match=field):
        model.model_validate({**others, field: timedelta(seconds=-1)})
