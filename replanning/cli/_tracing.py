"""What `--trace` names: the exporter that is told of a run, and of its spans."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from replanning._errors import Problem, SettingsError
from replanning._plugins import installed, load

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from replanning.interfaces import Exporter


@dataclass(frozen=True, slots=True)
class Trace:
    """The exporters of a run; leaving its context sends what is left.

    Attributes:
        exporters: told of everything that happens.
        provider: where spans go.
        place: where a person finds them.
    """

    exporters: tuple[Exporter, ...] = ()
    provider: TracerProvider | None = None
    place: str = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for exporter in self.exporters:
            await exporter.aclose()  # it says itself what it could not send


def open_trace(text: str | None) -> Trace:
    """The trace that `NAME` or `NAME=PLACE` asks for; none for None.

    An exporter is made of a place by its class method `from_target`.

    Raises:
        SettingsError: there is no such exporter.
        PluginError: it cannot be loaded.
    """
    if not text:
        return Trace()
    name, _, place = text.partition("=")
    if name not in installed("exporters"):
        known = ", ".join(installed("exporters"))
        raise SettingsError([Problem("--trace", f"there is no exporter {name!r}; installed are: {known}")])
    plugin: Any = load("exporters", name)  # `from_target` is optional
    if place and not hasattr(plugin, "from_target"):
        raise SettingsError([Problem("--trace", f"the exporter {name!r} takes no place: leave out {place!r}")])
    exporter: Exporter = plugin.from_target(place) if place else plugin()
    return Trace((exporter,), exporter.tracer_provider(), place or name)
