"""The tracker `opentelemetry`: what a run's spans say, and that a collector that is away costs nothing."""

from __future__ import annotations

import gzip
import http.server
import json
import threading

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.rollout_files import group, sample, write_run, writer

from areal.base.errors import UserError
from areal.config import load_config
from areal.config.reading import CONFIGS
from areal.extensions.trackers import collector
from areal.extensions.trackers.collector import SpanSender, open_exporter
from areal.extensions.trackers.tracking import TrackingProcess, open_sinks
from areal.storage.records import line_of

BEGAN = 1e9
CONFIG = load_config(CONFIGS / "quickstart.yaml", ["observe.trackers=[opentelemetry]", "observe.tensorboard=false"])


def step(number: int) -> str:
    """A step of ten seconds. Five of them train, two follow."""
    times = {"step_seconds": 10.0, "train_seconds": 5.0, "publish_wait_seconds": 2.0}
    return line_of({"step": number, "time": BEGAN + 10 * number, "reward_mean": 0.5, **times})


def measured(actor: str, span: str, at: float) -> str:
    return line_of({"time": BEGAN + at, "actor": actor, "span": span, "seconds": 1.0})


@pytest.fixture
def run(tmp_path):
    """A run of three steps, whose actors measured five spans, one after the last step."""
    (tmp_path / "journal.db").touch()
    (tmp_path / "metrics.jsonl").write_text("".join(map(step, (1, 2, 3))))
    beat = line_of({"time": BEGAN, "actor": "master/0", "state": "healthy", "activity": "", "stats": {}})
    trainer = [measured("trainer/0", span, at) for span, at in (("train", 3), ("train", 13), ("checkpoint", 32))]
    loads = [measured(f"generator/{n}", "load", 12.5) for n in (0, 1)]
    (tmp_path / "events.jsonl").write_text("".join([beat, *trainer, *loads]))
    write_run(tmp_path)
    later = writer(tmp_path)
    later.add_untrained(group(10, sample([("2+2", False), ("4", True)])), "discarded", "too late")
    later.write()
    return tmp_path


class Collector(InMemorySpanExporter):
    """A collector that refuses spans while it is `away`."""

    away = False

    def export(self, spans):
        return SpanExportResult.FAILURE if self.away else super().export(spans)


def sent(run, exporter=None):
    """The spans of a run that has ended."""
    exporter = exporter or Collector()
    SpanSender(CONFIG, run, exporter).close()
    return exporter.get_finished_spans()


def named(spans, name: str):
    return [span for span in spans if span.name == name]


def test_a_trained_sample_waits_for_its_permit_generates_is_scored_and_trained_in_one_trace(run):
    spans = sent(run)
    root = next(s for s in named(spans, "rl.sample") if s.attributes["rl.loop.iteration"] == 2)
    parts = {span.name: span for span in spans if span.parent == root.context}
    assert parts.keys() == {"areal.permit", "chat quickstart", "rl.reward", "rl.train"}
    assert {span.context.trace_id for span in parts.values()} == {root.context.trace_id}
    seconds = {name: (span.start_time / 1e9 - BEGAN, span.end_time / 1e9 - BEGAN) for name, span in parts.items()}
    assert seconds == {
        "areal.permit": (-3.0, 0.0),
        "chat quickstart": (0.0, 1.5),
        "rl.reward": (1.5, 2.0),
        "rl.train": (13.0, 18.0),
    }
    assert (root.start_time, root.end_time) == (parts["areal.permit"].start_time, parts["rl.train"].end_time)
    assert parts["rl.reward"].attributes["rl.reward.score"] == 0.5
    (link,) = parts["rl.train"].links
    loop = next(s for s in named(spans, "rl.loop") if s.attributes["rl.loop.iteration"] == 2)
    assert link.context == loop.context


def test_each_span_of_an_actor_is_one_of_the_step_in_which_it_began(run):
    spans = sent(run)
    loops = {span.context.span_id: span.attributes["rl.loop.iteration"] for span in named(spans, "rl.loop")}
    of_actors = [span for span in spans if "areal.actor" in span.attributes]
    assert sorted((s.attributes["areal.what"], s.name, loops.get(s.parent.span_id)) for s in of_actors if s.parent) == [
        ("load", "rl.sync", 2),
        ("load", "rl.sync", 2),
        ("train", "rl.train", 1),
        ("train", "rl.train", 2),
    ]
    assert [s.attributes["areal.what"] for s in of_actors if not s.parent] == ["checkpoint"]


def test_a_sample_that_was_not_trained_says_why_and_no_span_has_a_text_of_the_run(run):
    spans = sent(run)
    roots = named(spans, "rl.sample")
    (discarded,) = [span for span in roots if span.status.description]
    assert discarded.status.description == "too late"
    reasons = [
        (s.attributes["areal.fate"], s.attributes["areal.reason"]) for s in roots if "areal.reason" in s.attributes
    ]
    assert sorted(reasons) == [("discarded", "too late"), *[("filtered", "all rewards are equal")] * 2]
    assert len(roots) == 15 and len(named(spans, "rl.train")) == 12 + 2
    assert "2+2" not in "".join(span.to_json() for span in spans)


def test_a_run_that_goes_on_sends_only_what_is_new(run):
    assert sent(run)
    assert not sent(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(step(4))
    assert [span.attributes["rl.loop.iteration"] for span in sent(run)] == [4]


def test_a_collector_that_is_away_gets_all_spans_when_it_is_back_and_is_said_once(run, monkeypatch):
    warnings = []
    monkeypatch.setattr(collector.log, "warning", lambda *words, **numbers: warnings.append(words))
    exporter = Collector()
    exporter.away = True
    sender = SpanSender(CONFIG, run, exporter)
    sender._look(True)
    sender._look(True)
    assert len(warnings) == 1 and not (run / "traced.json").exists()
    exporter.away = False
    sender._look(True)
    assert {s.context.span_id for s in exporter.get_finished_spans()} == {s.context.span_id for s in sent_anew(run)}
    sender.close()


def sent_anew(run):
    (run / "traced.json").unlink()
    return sent(run)


def test_a_collector_that_does_not_answer_does_not_delay_the_records_of_other_trackers(run):
    exporting, goes_on = threading.Event(), threading.Event()

    class Silent(Collector):
        def export(self, spans):
            exporting.set()
            goes_on.wait()
            return SpanExportResult.FAILURE

    sender = SpanSender(CONFIG, run, Silent())
    sender(1, {}, BEGAN)
    assert exporting.wait(60)
    sender(2, {}, BEGAN)  # returns
    goes_on.set()
    sender.close()


def test_the_environment_chooses_a_share_of_the_traces_and_names_the_service(run, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    assert not sent(run)
    (run / "traced.json").unlink(missing_ok=True)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "1")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    resource = sent(run)[0].resource.attributes
    assert (resource["service.name"], resource["rl.algorithm"]) == ("mine", "decoupled_ppo")


def test_spans_arrive_at_a_server_of_otlp_over_http(run, monkeypatch):
    requests = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append((self.path, self.headers["Authorization"], gzip.decompress(body)))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *words):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Bearer%20key")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    (sender,) = open_sinks(CONFIG, run).values()
    sender.close()
    server.shutdown()
    server.server_close()
    assert {request[:2] for request in requests} == {("/v1/traces", "Bearer key")}
    (run / "traced.json").unlink()
    expected = {span.context.span_id: span.name for span in sent(run)}
    arrived = {}
    for *_, body in requests:
        for spans in ExportTraceServiceRequest.FromString(body).resource_spans:
            arrived |= {int.from_bytes(s.span_id): s.name for scope in spans.scope_spans for s in scope.spans}
    assert arrived == expected


def test_an_unknown_protocol_is_refused_by_a_sentence(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "smoke")
    with pytest.raises(UserError, match="'smoke': set it to http/protobuf or grpc"):
        open_exporter()
    TrackingProcess.check(CONFIG.observe)


def test_a_damaged_state_begins_anew(run):
    (run / "traced.json").write_text(json.dumps({"step": None, "file": "7"}))
    assert len(named(sent(run), "rl.loop")) == 3
