"""Spans of OpenTelemetry: one trace per sample, in tools, and in the requests that reach the real server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from verl_server.tracing import continue_trace, trace_headers


@pytest.fixture(scope="module")
def exporter() -> Iterator[InMemorySpanExporter]:
    """The spans of a program with a tracer provider. A process cannot unset its provider, so it gets none here."""
    exported, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exported))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl_server.tracing._tracer", provider.get_tracer("verl_server"))
        yield exported


def test_without_a_trace_no_header_is_sent(exporter: InMemorySpanExporter) -> None:
    assert trace_headers() == {}
    with continue_trace({}), continue_trace({"traceparent": "nonsense"}):
        assert trace_headers() == {}
    parent = {"traceparent": f"00-{7:032x}-{9:016x}-01"}
    with continue_trace(parent):
        assert trace_headers() == parent
    assert trace_headers() == {}


def test_a_span_of_another_provider_stays_the_current_span() -> None:
    """A program can hold a provider by itself. Tools set attributes on its span, in a process without this fixture."""
    code = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from verl_server.tracing import span
with TracerProvider().get_tracer("own").start_as_current_span("outer") as outer, span("inner", {}):
    trace.get_current_span().set_attribute("user", 1)
assert dict(outer.attributes) == {"user": 1}, outer.attributes
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
