"""A span for each request, where OpenTelemetry has been set up; otherwise it is not even imported.

Whoever wants traces has imported `opentelemetry` before the first request (`opentelemetry-instrument python app.py`
does); this module only looks whether that happened. Spans carry lengths and times, never text.
"""

import logging
import sys
from typing import Any

from engine.generation import Generation

logger = logging.getLogger(__name__)


def caller() -> Any:
    """The trace that the caller is in, under which a request's span belongs; None where nothing is traced."""
    if "opentelemetry.trace" not in sys.modules:
        return None
    from opentelemetry import context

    return context.get_current()


def record(generation: Generation, model: str) -> None:
    """The span of a request that has ended, with children for its queueing, its prefill and its decoding."""
    if "opentelemetry.trace" not in sys.modules:
        return
    from opentelemetry import trace

    try:
        _record(trace, generation, model)
    except Exception:  # an exporter's trouble is no request's
        logger.exception("A span could not be recorded.")


def _record(trace: Any, generation: Generation, model: str) -> None:
    tracer = trace.get_tracer("kvscope")
    times, ended = generation.times, generation.times.ended or generation.times.queued
    span = tracer.start_span(
        "generate", generation.trace, start_time=_nanoseconds(times.queued), attributes=_attributes(generation, model)
    )
    inside = trace.set_span_in_context(span, generation.trace)
    stations = (
        ("queue", times.queued, times.prefill),
        ("prefill", times.prefill, times.decode),
        ("decode", times.decode, ended),
    )
    for name, start, end in stations:
        if start is not None:
            child = tracer.start_span(name, inside, start_time=_nanoseconds(start))
            child.end(_nanoseconds(end or ended))
    if generation.error:
        span.set_status(trace.Status(trace.StatusCode.ERROR, generation.error))
    span.end(_nanoseconds(ended))


def _attributes(generation: Generation, model: str) -> dict[str, Any]:
    """Named as OpenTelemetry's conventions for generative models have them, as far as they go."""
    return {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": generation.prompt_tokens,
        "gen_ai.usage.output_tokens": len(generation.events),
        "gen_ai.response.finish_reasons": [generation.finish_reason or ""],
        "kvscope.request": generation.id,
        "kvscope.reused_tokens": generation.reused_tokens,
        "kvscope.shared_with": generation.shared_with,
        "kvscope.resumed": generation.resumed,
    }


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
