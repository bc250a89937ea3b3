#!/usr/bin/env python3
"""Traces of a real server are messages of OpenTelemetry's own schema, and this check can fail.

    tests/deploy/traces.py THUNDER

The schema is `ExportTraceServiceRequest` of opentelemetry-proto (PyPI, Apache-2.0). protobuf's parser refuses fields,
types and numbers that it does not have.
"""

import base64
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
RANKS, LIMIT_S = 2, 30
received = []


class Collector(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        received.append((self.path, self.headers["content-type"], json.loads(body)))
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        pass


def parsed(message):
    """OTLP writes ids in hexadecimal digits, protobuf's own JSON in base 64."""
    def with_ids(value):
        if isinstance(value, list):
            return [with_ids(item) for item in value]
        if not isinstance(value, dict):
            return value
        ids = {"traceId", "spanId", "parentSpanId"}
        return {name: base64.b64encode(bytes.fromhex(item)).decode() if name in ids else with_ids(item)
                for name, item in value.items()}
    return json_format.ParseDict(with_ids(message), ExportTraceServiceRequest())


def check(spans):
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans), "two spans have the same id"
    roots = [span for span in spans if span.parent_span_id == bytes.fromhex(PARENT)]
    assert len(roots) == 1 and roots[0].kind == 2, roots
    assert roots[0].name == "POST /v1/completions", roots[0].name
    for span in spans:
        assert span.trace_id == bytes.fromhex(TRACE), span.trace_id.hex()
        assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano, span
        if span is not roots[0]:
            parent = by_id[span.parent_span_id]
            assert parent.start_time_unix_nano <= span.start_time_unix_nano, (span.name, parent.name)
            assert span.end_time_unix_nano <= parent.end_time_unix_nano, (span.name, parent.name)
    names = [span.name for span in spans]
    for stage in ["gateway", "queue", "prefill", "decode"]:
        assert names.count(stage) == 1, names
    assert names.count("rank") == 2 * RANKS, f"a span for each rank in prefill and in decode: {names}"


collector = HTTPServer(("127.0.0.1", 0), Collector)
threading.Thread(target=collector.serve_forever, daemon=True).start()
server = subprocess.Popen(
    [sys.argv[1], "serve", "builtin", "--no-store", "--port", "0", "--ranks", str(RANKS), "--threads", "1",
     "--otlp", f"http://127.0.0.1:{collector.server_port}"],
    stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
try:
    address = next(found[0] for line in server.stderr if (found := re.search(r"http://[\d.:]+", line)))
    threading.Thread(target=server.stderr.read, daemon=True).start()
    body = json.dumps({"model": "builtin", "prompt": "The sea", "max_tokens": 8}).encode()
    headers = {"content-type": "application/json", "traceparent": f"00-{TRACE}-{PARENT}-01"}
    urllib.request.urlopen(urllib.request.Request(f"{address}/v1/completions", body, headers), timeout=LIMIT_S).read()
    until = time.monotonic() + LIMIT_S
    while not received and time.monotonic() < until:
        time.sleep(0.05)
    assert received, "no trace came"
    path, kind, message = received[0]
    assert (path, kind) == ("/v1/traces", "application/json"), (path, kind)
    scopes = [scope for resource in parsed(message).resource_spans for scope in resource.scope_spans]
    spans = [span for scope in scopes for span in scope.spans]
    check(spans)
finally:
    server.terminate()
    server.wait()

for place, wrong in [("kind", "SPAN_KIND_SERVED"), ("startTimeUnixNano", "soon"), ("spann", "x"), ("traceId", 5)]:
    message["resourceSpans"][0]["scopeSpans"][0]["spans"][0] |= {place: wrong}
    try:
        parsed(message)
    except (json_format.ParseError, TypeError):
        del message["resourceSpans"][0]["scopeSpans"][0]["spans"][0][place]
    else:
        raise SystemExit(f"{place}: {wrong!r} is taken")
print(f"traces: right, {len(spans)} spans")
