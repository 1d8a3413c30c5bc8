"""The exporter of spans over OTLP/HTTP, against a receiver and against one that is dead."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from replanning import ReplanningEngine, Retry, RunResult, Settings, __version__
from replanning.errors import SettingsError
from replanning.exporters.otlp import OtlpExporter
from replanning.testing import (
    ScriptedExecutor,
    ScriptedProvider,
    VirtualClock,
    raises,
    returns,
    virtual_environment,
)
from tests.support.collector import Collector, plain
from tests.support.http_server import Answer, HttpServer, Request
from tests.support.runs import again, chain
from tests.support.tracing import Spans, output_of, tree

LOG = "replanning.exporters.otlp"


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A receiver that takes everything."""
    with Collector() as made:
        yield made


@pytest.fixture
def nowhere() -> str:
    """An address at which nothing listens."""
    with HttpServer() as closed:
        return closed.url


async def repaired(exporter: OtlpExporter) -> tuple[ReplanningEngine, RunResult]:
    """A run with a failure, a replan and a replacement, on virtual time, that is sent by an exporter, closed after it."""
    async with VirtualClock() as clock:
        engine = ReplanningEngine(
            [ScriptedProvider(lambda request: returns(again(request), after=3), clock=clock)],
            settings=Settings(retry=Retry(max_attempts=1)),
            exporters=[exporter],
            environment=virtual_environment(clock=clock),
        )
        script = {
            "a": returns(after=1),
            "b": raises(ValueError("broken"), after=2),
            "b~2": returns(after=4),
        }
        result = await engine.execute(chain("a", "b", "c"), ScriptedExecutor(script, clock=clock))
    await engine.aclose()
    assert result.status == "succeeded"
    return engine, result


async def send(exporter: OtlpExporter, name: str = "one") -> None:
    """Send one span of this name, and close the exporter."""
    exporter.tracer_provider().get_tracer("mine").start_span(name).end()
    await exporter.aclose()


async def test_the_same_tree_over_the_wire(collector):
    """What a collector receives is the tree of the run: names, parents, links, attributes, kinds, status, times."""
    exporter = OtlpExporter(collector.url)
    spans = Spans(exporter.tracer_provider())
    await repaired(exporter)
    (run,) = tree(collector.spans)
    assert (run,) == spans.tree()
    replanned = ["propose scripted", "replanning.score", "replanning.apply"]
    assert [
        (node.name, [child.name for child in node.children], node.links, node.error)
        for node in run.children
    ] == [
        ("replanning.attempt", [], (), None),
        ("replanning.attempt", [], (), "broken"),
        ("plan replanning", replanned, (("b#1", "caused-by"),), None),
        ("replanning.attempt", [], (("b#1", "replaces"),), None),
        ("replanning.attempt", [], (), None),
    ]
    assert exporter.problem == ""


async def test_resource(collector, monkeypatch):
    """Spans come from the service `replanning` in its version, or under the name that is asked for, and from this host."""
    await send(OtlpExporter(collector.url))
    monkeypatch.setenv("OTEL_SERVICE_NAME", "from the environment")
    await send(OtlpExporter(collector.url))
    await send(OtlpExporter(collector.url, service_name="nightly"))
    names = [resource["service.name"] for resource in collector.resources]
    assert names == ["replanning", "from the environment", "nightly"]
    others = {
        (resource["service.version"], resource["host.name"]) for resource in collector.resources
    }
    assert others == {(__version__, socket.gethostname())}


@pytest.mark.parametrize(
    "form", ["http://{}", "http://{}/", "http://{}/v1/traces", " http://{} ", "{}"]
)
async def test_forms_of_an_address(collector, form):
    """An address reaches the collector with and without a slash, a path for spans, or a scheme."""
    await send(OtlpExporter.from_target(form.format(collector.url.removeprefix("http://"))))
    assert [span.name for span in collector.spans] == ["one"]


@pytest.mark.parametrize(
    "address", ["ftp://host:4318", "http://", "http://host:99999", "http://a b", "?"]
)
def test_no_address(address):
    """What is no address of a collector is refused, with one that would be."""
    with pytest.raises(SettingsError) as caught:
        OtlpExporter.from_target(address)
    assert repr(address) in str(caught.value)
    assert "http://localhost:4318" in str(caught.value)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the exporter has logged."""
    return [record.message for record in caplog.records if record.name == LOG]


async def test_headers(collector):
    """Headers that the collector wants are sent with every request."""
    await send(OtlpExporter(collector.url, headers={"x-key": "abc"}))
    assert [request.headers["x-key"] for request in collector.requests] == ["abc"]


async def test_metrics_only_when_asked_for(collector, monkeypatch):
    """Metrics are sent if wanted, by an argument or a variable and to a place of their own if there is one, marked with the process."""
    await repaired(OtlpExporter(collector.url))
    await repaired(OtlpExporter(collector.url, metrics=True))
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"{collector.url}/elsewhere")
    await repaired(OtlpExporter(collector.url))
    await repaired(OtlpExporter(collector.url, metrics=False))
    sent = [request for request in collector.requests if request.path != "/v1/traces"]
    assert [request.path for request in sent] == ["/v1/metrics", "/elsewhere"]
    groups = [
        group
        for request in sent
        for group in ExportMetricsServiceRequest.FromString(request.body).resource_metrics
    ]
    assert all(plain(group.resource.attributes)["service.instance.id"] for group in groups)
    names = {
        metric.name for group in groups for scope in group.scope_metrics for metric in scope.metrics
    }
    assert {"replanning.replans", "replanning.attempts", "replanning.replan.duration"} <= names


async def test_dead_collector(nowhere, caplog):
    """Where nothing listens, the run is as ever, and what was lost is said once, with the address."""
    exporter = OtlpExporter(nowhere, timeout=0.1)
    await repaired(exporter)
    assert exporter.problem.startswith(
        f"9 spans could not be sent to {nowhere}; is a collector listening there?"
    )
    assert said(caplog) == [exporter.problem]


async def test_stuck_collector(caplog):
    """A collector that never answers holds up neither the run nor, beyond the limit, the end of the program."""
    released = threading.Event()

    def wait(request: Request) -> Answer:
        released.wait()
        return 200, {}, b""

    with ExitStack() as stack:
        collector = stack.enter_context(HttpServer(wait))
        stack.callback(released.set)
        exporter = OtlpExporter(collector.url, timeout=600, close_limit=0.05)
        await repaired(exporter)
    assert (
        exporter.problem
        == f"{collector.url} did not take all spans within 50 ms at the end; the rest is lost"
    )
    assert len(said(caplog)) == 1


async def test_passwords_in_addresses_are_not_shown(nowhere, caplog):
    """A password in the address is in no message."""
    exporter = OtlpExporter(nowhere.replace("//", "//ada:hunter2@"), timeout=0.1)
    await send(exporter)
    assert "hunter2" not in repr(exporter) + exporter.problem + caplog.text


UNCLOSED = """
import anyio, sys
from replanning import ReplanningEngine
from replanning.exporters.otlp import OtlpExporter
from tests.support.runs import chain, failing

anyio.run(ReplanningEngine([], exporters=[OtlpExporter(sys.argv[1])]).execute, chain("a"), failing())
"""

MISSING = """
import sys
sys.modules["opentelemetry.exporter.otlp.proto.http"] = None
from replanning.errors import PluginError
from replanning.plugins import load_plugin
try:
    load_plugin("exporters", "otlp")
except PluginError as error:
    print(error)
"""


def test_end_of_the_program(collector):
    """A program that does not close the exporter still sends its spans when it ends."""
    output_of(UNCLOSED, collector.url)
    assert sorted(span.name for span in collector.spans) == ["replanning.attempt", "replanning.run"]


def test_missing_extra():
    """Where the optional part is not installed, the message says how to install it."""
    assert "pip install 'replanning[otlp]'" in output_of(MISSING)
