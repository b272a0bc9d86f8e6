"""Spans where OpenTelemetry is set up, and nothing at all where it is not."""

import subprocess
import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine import SamplingParams

WAIT_S = 60


@pytest.fixture
def exporter(monkeypatch):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


def spans_of(engine, exporter, generation) -> dict:
    """By name, once the engine has let go of the request."""
    generation.result(WAIT_S)
    engine.snapshot()  # takes the lock under which the span is written
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_request_is_a_span_with_its_stations_as_children(tiny_engine, exporter):
    engine = tiny_engine()
    with trace.get_tracer("caller").start_as_current_span("page view"):
        generation = engine.submit("Some secret text", SamplingParams(max_new_tokens=5, ignore_eos=True))
    spans = spans_of(engine, exporter, generation)
    whole, stations = spans["generate"], [spans[name] for name in ("queue", "prefill", "decode")]
    assert whole.parent.span_id == spans["page view"].context.span_id
    assert all(station.parent.span_id == whole.context.span_id for station in stations)
    edges = [whole.start_time, *(station.end_time for station in stations)]
    assert [station.start_time for station in stations] == edges[:-1] == sorted(edges)[:-1]
    assert edges[-1] == whole.end_time
    assert whole.attributes["gen_ai.usage.input_tokens"] == 16
    assert whole.attributes["gen_ai.usage.output_tokens"] == 5
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert "secret" not in whole.to_json() and whole.status.is_ok is not False


def test_one_that_was_never_admitted_has_only_waited(tiny_engine, exporter):
    engine = tiny_engine(max_batch_size=1)
    running = engine.submit("abc", SamplingParams(max_new_tokens=2000, ignore_eos=True))
    waiting = engine.submit("abc", SamplingParams(max_new_tokens=5))
    waiting.cancel()
    spans = spans_of(engine, exporter, waiting)
    assert set(spans) == {"generate", "queue"}
    assert spans["generate"].attributes["gen_ai.response.finish_reasons"] == ("cancelled",)
    running.cancel()


def test_what_fails_is_an_error_in_its_trace(tiny_engine, exporter):
    engine = tiny_engine()
    engine.submit("abc", SamplingParams(max_new_tokens=2000, ignore_eos=True))
    engine.close()
    (span,) = [span for span in exporter.get_finished_spans() if span.name == "generate"]
    assert span.status.status_code is trace.StatusCode.ERROR and "closed" in span.status.description


def test_without_it_nothing_is_imported(tiny_folder):
    script = (
        "import sys; from engine import *\n"
        f"with Engine.from_pretrained({str(tiny_folder)!r}, device='cpu') as engine:\n"
        "    engine.submit('abc', SamplingParams(max_new_tokens=3)).result(60)\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
