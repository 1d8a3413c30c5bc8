"""The dashboard for Grafana: its queries, asked of a real Prometheus that reads the metrics of real runs."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry, start_http_server

from replanning import Answer, CallbackGate, ReplanningEngine, Settings
from replanning.exporters.otlp import OtlpExporter
from replanning.telemetry import names
from tests.support.backends import Prometheus, eventually, free_ports, jaeger, prometheus, read_text
from tests.support.runs import Proposer, again, chain, failing

pytestmark = [pytest.mark.slow, pytest.mark.integration]

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "replanning.json"
SETTINGS = {"retry": {"max_attempts": 1}, "alternatives": {"require_approval": True}}


def queries(window: str = "1h") -> dict[str, str]:
    """The queries of the dashboard by their panels and letters, as Grafana asks them for one interval."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    found = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in panels
        for target in panel["targets"]
    }
    return {
        name: re.sub(r"\$__(interval|range)", window, query).replace("$job", "replanning")
        for name, query in found.items()
    }


async def repaired(**options: Any) -> None:
    """A run of three attempts, of which one fails and is replaced as a person agrees."""
    gate = CallbackGate(lambda question: Answer("approve", by="ada"))
    engine = ReplanningEngine(
        [Proposer(again)], settings=Settings.model_validate(SETTINGS), gate=gate, **options
    )
    assert (await engine.execute(chain("a", "b"), failing("a"))).status == "succeeded"
    await engine.aclose()


@pytest.fixture
def read(tmp_path: Path) -> Iterator[tuple[MeterProvider, Prometheus]]:
    """Where metrics of runs go, and the Prometheus that reads them."""
    (address,) = free_ports(1)
    registry = CollectorRegistry()
    with prometheus(tmp_path, address) as running:
        server, thread = start_http_server(int(address.partition(":")[2]), "127.0.0.1", registry)
        yield MeterProvider([PrometheusMetricReader(registry=registry)]), running
        server.shutdown()
        server.server_close()
        thread.join()


async def test_queries(read):
    """After a run each query of the dashboard has data, which counts what happened in the interval and nothing before it."""
    meters, running = read
    await repaired(meter_provider=meters)
    eventually(lambda: running.values(queries()["Attempts A"]) == {"": 3})
    found = {name: running.values(query) for name, query in queries().items()}
    assert [
        name
        for name, values in found.items()
        if not values or any(map(math.isnan, values.values()))
    ] == []
    assert found["Attempts by outcome A"] == {"failed": 1, "succeeded": 2}
    assert found["Unsuccessful attempts A"] == {"": pytest.approx(1 / 3)}
    assert found["Replans by trigger A"] == {"task-failed": 1}
    assert found["Decisions A"] == {"ask policy": 1, "execute person": 1}
    assert found["Mean confidence in alternatives, by provider A"] == {
        "scripted": pytest.approx(0.81)
    }

    (began,) = running.values("vector(time())").values()
    await repaired(meter_provider=meters)
    eventually(lambda: running.values(queries()["Attempts A"]) == {"": 6})
    (now,) = running.values("vector(time())").values()
    since = queries(f"{round((now - began) * 1000)}ms")
    assert running.values(since["Attempts by outcome A"], at=now) == {"failed": 1, "succeeded": 2}


async def test_names_over_the_wire(tmp_path):
    """Metrics that a collector receives and Prometheus reads from it have the names that the dashboard asks for."""
    with jaeger(tmp_path) as collector:
        if collector.metrics is None:
            pytest.skip("the Jaeger at JAEGER_ENDPOINT does not take metrics")
        await repaired(exporters=[OtlpExporter(collector.endpoint, metrics=True)])
        asked = set(re.findall(r"replanning_\w+(?={job)", json.dumps(queries())))
        told = read_text(collector.metrics)
    assert {name for name in asked if f"\n{name}{{" not in told} == set()
    assert {re.sub(r"_(total|seconds|bucket|sum|count)", "", name) for name in asked} == {
        value.replace(".", "_") for name, value in vars(names).items() if name.endswith("_METRIC")
    }
