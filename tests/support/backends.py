"""Jaeger and Prometheus as real programs, which receive what a run sends; where there is none, the test is skipped."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest
import tenacity
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from tests.support.collector import Collector, received
from tests.support.tracing import Flat, Node, tree

BUILT: Final = Path(__file__).parents[2] / "scripts" / "jaeger"
PATIENCE: Final = 300.0
"""Seconds after which a program that does not answer, or does not have what was sent to it, is given up."""

WARNINGS: Final = "@jaeger@warnings"
"""The attribute in which Jaeger says what is wrong with a span."""

JAEGER: Final = """
service:
  extensions: [jaeger_storage, jaeger_query]
  pipelines:
    traces: {{receivers: [otlp], exporters: [jaeger_storage_exporter]}}
    metrics: {{receivers: [otlp], exporters: [prometheus]}}
  telemetry: {{metrics: {{level: none}}}}
extensions:
  jaeger_storage: {{backends: {{memory: {{memory: {{max_traces: 1000}}}}}}}}
  jaeger_query: {{storage: {{traces: memory}}, http: {{endpoint: "{query}"}}, grpc: {{endpoint: "{grpc}"}}}}
receivers: {{otlp: {{protocols: {{http: {{endpoint: "{otlp}"}}}}}}}}
exporters:
  jaeger_storage_exporter: {{trace_storage: memory}}
  prometheus: {{endpoint: "{metrics}"}}
"""


class Jaeger(NamedTuple):
    """Jaeger, by the addresses at which it takes spans and metrics, tells of spans, and tells of metrics."""

    endpoint: str
    query: str
    metrics: str | None = None

    def spans(self, traceparent: str, complete: Callable[[list[Flat]], bool]) -> list[Flat]:
        """Return the spans of a trace once they are complete."""
        return eventually(
            lambda: found if complete(found := self._read(traceparent, raw_traces=True)) else None
        )

    def tree(self, traceparent: str, complete: Callable[[list[Flat]], bool]) -> tuple[Node, ...]:
        """Return a trace once it is complete; Jaeger must have nothing to object to, such as a parent that is missing."""
        self.spans(traceparent, complete)
        spans = self._read(traceparent)
        warnings = [span.attributes[WARNINGS] for span in spans if WARNINGS in span.attributes]
        assert warnings == [], spans
        return complete_tree(spans)

    def _read(self, traceparent: str, **options: bool) -> list[Flat]:
        answer = httpx.get(
            f"{self.query}/api/v3/traces/{traceparent.split('-')[1]}", params=options
        )
        if answer.status_code == httpx.codes.NOT_FOUND:
            return []
        groups = ParseDict(
            _with_base64(answer.raise_for_status().json()["result"]), TracesData()
        ).resource_spans
        return [
            received(span)
            for group in groups
            for scope in group.scope_spans
            for span in scope.spans
        ]

    def text(self, traceparent: str) -> str:
        """Return all that it tells of a trace."""
        return read_text(f"{self.query}/api/traces/{traceparent.split('-')[1]}")


class Received(NamedTuple):
    """What a collector in this process has received, asked as Jaeger is; it has room for one trace."""

    collector: Collector

    @property
    def endpoint(self) -> str:
        return self.collector.url

    def spans(self, traceparent: str, complete: Callable[[list[Flat]], bool]) -> list[Flat]:
        """Return the spans of a trace once they are complete."""

        def read() -> list[Flat] | None:
            spans = self.collector.spans
            return spans if complete(spans) else None

        found: list[Flat] = eventually(read)
        for message in self.collector.messages:
            for group in message.resource_spans:
                for scope in group.scope_spans:
                    traces = {span.trace_id.hex() for span in scope.spans}
                    assert traces == {traceparent.split("-")[1]}
        return found

    def tree(self, traceparent: str, complete: Callable[[list[Flat]], bool]) -> tuple[Node, ...]:
        """Return a trace once it is complete; no span may have a parent that is missing."""
        return complete_tree(self.spans(traceparent, complete))

    def text(self, traceparent: str) -> str:
        """Return all that it was told."""
        return "".join(map(str, self.collector.messages))


def complete_tree(spans: list[Flat]) -> tuple[Node, ...]:
    """Return spans as trees; each must be there once, and so must its parent."""
    ids = [span.id for span in spans]
    orphans = [span for span in spans if span.parent not in (None, *ids)]
    assert len(set(ids)) == len(ids), spans
    assert orphans == [], spans
    return tree(spans)


def _with_base64(value: Any, key: str = "") -> Any:
    """Return JSON of OTLP, whose ids are hexadecimal, as JSON of protobuf."""
    if isinstance(value, dict):
        return {name: _with_base64(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_base64(item) for item in value]
    return (
        base64.b64encode(bytes.fromhex(value)).decode()
        if key in ("traceId", "spanId", "parentSpanId")
        else value
    )


def read_text(url: str) -> str:
    """Return what is at an address."""
    return httpx.get(url).raise_for_status().text


def eventually(attempt: Callable[[], Any]) -> Any:
    """Return what a function returns once that is something; until then the program that it asks may be starting."""
    try:
        return tenacity.Retrying(
            stop=tenacity.stop_after_delay(PATIENCE),
            wait=tenacity.wait_fixed(0.1),
            retry=tenacity.retry_if_result(lambda found: not found)
            | tenacity.retry_if_exception_type(httpx.TransportError),
        )(attempt)
    except tenacity.RetryError as error:
        raise AssertionError(f"not within {PATIENCE:g} s: {attempt}") from error


def free_ports(count: int) -> list[str]:
    """Return addresses of this machine at which nothing listens."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    return addresses


@contextmanager
def started(folder: Path, *command: object) -> Iterator[None]:
    """Run a program until the block is left."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*map(str, command)], cwd=folder, stdout=log, stderr=log)
    try:
        yield
    except BaseException:
        print((folder / "log").read_text(errors="replace")[-2_000:])  # noqa: T201 - shown with the failure
        raise
    finally:
        process.kill()
        process.wait()


@contextmanager
def jaeger(folder: Path) -> Iterator[Jaeger]:
    """Use the Jaeger at JAEGER_ENDPOINT, or start the one on the PATH or the one that `scripts/jaeger` has built."""
    if endpoint := os.environ.get("JAEGER_ENDPOINT"):
        yield Jaeger(
            endpoint, os.environ.get("JAEGER_QUERY", f"http://{urlsplit(endpoint).hostname}:16686")
        )
        return
    program = shutil.which("jaeger")
    if program is None:
        program = subprocess.run([BUILT, "--find"], capture_output=True, text=True).stdout.strip()
    if not program:
        pytest.skip(
            "needs Jaeger: `scripts/jaeger` builds it, or `docker compose up` and JAEGER_ENDPOINT=http://localhost:4318"
        )
    otlp, query, grpc, metrics = free_ports(4)
    (folder / "jaeger.yaml").write_text(
        JAEGER.format(otlp=otlp, query=query, grpc=grpc, metrics=metrics)
    )
    with started(folder, program, "--config", "jaeger.yaml"):
        made = Jaeger(f"http://{otlp}", f"http://{query}", f"http://{metrics}/metrics")
        for url in (made.query, made.endpoint):
            eventually(lambda url=url: httpx.get(url))  # type: ignore[misc]
        yield made


class Prometheus(NamedTuple):
    """Prometheus, by the address at which it answers queries."""

    url: str

    def values(self, query: str, *, at: float | None = None) -> dict[str, float]:
        """Return the values of a query at a time, or now, by the labels of their series."""
        when = {} if at is None else {"time": at}
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": query, **when}).json()
        assert answer["status"] == "success", (query, answer)
        return {
            " ".join(f"{value}" for _, value in sorted(series["metric"].items())): float(
                series["value"][1]
            )
            for series in answer["data"]["result"]
        }


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
    """Start the Prometheus on the PATH, which reads the metrics at an address as those of the service `replanning`."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip(
            "needs the program prometheus: on Debian and Ubuntu `sudo apt install prometheus`"
        )
    (address,) = free_ports(1)
    read = {
        "job_name": "replanning",
        "static_configs": [{"targets": [target]}],
        "scrape_interval": "200ms",
    }
    (folder / "prometheus.yml").write_text(
        json.dumps({"scrape_configs": [{**read, "scrape_timeout": "200ms"}]})
    )
    flags = (
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
        f"--web.listen-address={address}",
    )
    with started(folder, program, *flags):
        made = Prometheus(f"http://{address}")
        eventually(lambda: httpx.get(f"{made.url}/-/ready").is_success)
        yield made
