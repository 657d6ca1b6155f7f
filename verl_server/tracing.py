"""Spans of OpenTelemetry, and their trace context in HTTP headers (W3C Trace Context).

A program that sets a tracer provider gets one trace for each sample. Without a provider a span costs a microsecond.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping

from opentelemetry import context, trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

_propagator = TraceContextTextMapPropagator()
_tracer = trace.get_tracer("verl_server")


@contextlib.contextmanager
def span(name: str, attributes: Mapping[str, AttributeValue], *, is_root: bool = False) -> Iterator[trace.Span]:
    """A span of the block. `is_root`: the span begins a trace of its own, with a link to the current span.

    An exception of the block is recorded in the span.
    """
    current = trace.get_current_span().get_span_context() if is_root else trace.INVALID_SPAN_CONTEXT
    parent = context.Context() if is_root else None
    links = [trace.Link(current)] if current.is_valid else None
    opened = _tracer.start_span(name, parent, attributes=attributes, links=links)
    if opened is trace.INVALID_SPAN or _is_stand_in(opened):  # the program has set no provider
        yield opened
        return
    with trace.use_span(opened, end_on_exit=True):
        yield opened


def _is_stand_in(opened: trace.Span) -> bool:
    """Whether a span only stands for the current span, which must stay the current span. It may be of a provider that
    the program has not set as the provider of all libraries.
    """
    return not opened.is_recording() and opened.get_span_context() == trace.get_current_span().get_span_context()


def trace_headers() -> dict[str, str]:
    """HTTP headers that continue the current trace in another process. Empty without a trace."""
    headers: dict[str, str] = {}
    if trace.get_current_span().get_span_context().is_valid:
        _propagator.inject(headers)
    return headers


@contextlib.contextmanager
def continue_trace(headers: Mapping[str, str]) -> Iterator[None]:
    """Let the block belong to the trace of a request with these headers."""
    if "traceparent" not in headers:
        yield
        return
    token = context.attach(_propagator.extract(headers))
    try:
        yield
    finally:
        context.detach(token)


# -- Garbage collection -----------------------------------------------------------------------------
# How often Python looks for cyclic garbage in a process that serves requests.


def collect_garbage_rarely() -> None:
    """Let Python look for cyclic garbage after 50,000 new objects instead of 700. For a process of our own.

    Each running request has about a hundred objects. With Python's default, most of the time of a burst of requests
    goes into looking at the objects of all running requests, again and again. Objects that exist now, for example the
    modules, are never looked at again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
