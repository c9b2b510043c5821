"""An OpenAI-compatible server with vLLM's counters, in this process: its steps take a stated time on paper only."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

#: How many drafted tokens are right, step after step, whatever K is.
RIGHT = (3, 0, 1, 3)


@dataclass
class FakeServer:
    """``step_seconds`` is what the histogram says of each step. Counters begin at some number, as after other work."""

    k: int
    step_seconds: float
    model: str = "tiny"
    stats: bool = True
    before: int = 1000
    url: str = ""
    bodies: list[dict] = field(default_factory=list)
    refuse: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.requests = self.tokens = self.rows = self.drafts = self.drafted = self.before
        self.seconds = float(self.before)
        self.accepted = [self.before] * self.k
        self.prefill = 0

    def generate(self, body: dict) -> None:
        with self.lock:
            self.bodies.append(body)
            length, step = 1, 0
            while length < body["max_tokens"]:
                accepted = min(self.k, RIGHT[step % len(RIGHT)])
                step, length = step + 1, length + 1 + accepted
                self.rows, self.seconds = self.rows + 1, self.seconds + self.step_seconds
                if self.k:
                    self.drafts, self.drafted = self.drafts + 1, self.drafted + self.k
                for i in range(accepted):
                    self.accepted[i] += 1
            self.requests, self.tokens = self.requests + 1, self.tokens + min(length, body["max_tokens"])

    def metrics(self) -> str:
        """The text format of Prometheus, as vLLM 0.32 writes it."""
        labels = f'engine="0",model_name="{self.model}"'
        lines = [
            "# HELP vllm:generation_tokens_total Number of generation tokens processed.",
            "# TYPE vllm:generation_tokens_total counter",
            f"vllm:generation_tokens_total{{{labels}}} {float(self.tokens)}",
            f"vllm:generation_tokens_created{{{labels}}} 1.764466e+09",
            'vllm:generation_tokens_total{engine="0",model_name="other"} 77.0',
            f'vllm:request_success_total{{{labels},finished_reason="stop"}} 0.0',
            f'vllm:request_success_total{{{labels},finished_reason="length"}} {float(self.requests)}',
        ]
        if self.stats:
            name = "vllm:inter_token_latency_seconds"
            lines += [
                f'{name}_bucket{{{labels},le="0.01"}} 0.0',
                f'{name}_bucket{{{labels},le="+Inf"}} {float(self.rows)}',
                f"{name}_count{{{labels}}} {float(self.rows)}",
                f"{name}_sum{{{labels}}} {self.seconds!r}",
            ]
        if self.k:
            prefix = "vllm:spec_decode_num"
            lines += [
                f"{prefix}_drafts_total{{{labels}}} {float(self.drafts)}",
                f"{prefix}_draft_tokens_total{{{labels}}} {float(self.drafted)}",
                f"{prefix}_accepted_tokens_total{{{labels}}} {float(sum(self.accepted))}",
            ]
            lines += [
                f'{prefix}_accepted_tokens_per_pos_total{{{labels},position="{i}"}} {float(n)}'
                for i, n in enumerate(self.accepted)
            ]
        return "\n".join(lines) + "\n"


@contextmanager
def serving(server: FakeServer) -> Iterator[FakeServer]:
    """Runs it on a free port of the loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            pages = {
                "/v1/models": json.dumps({"data": [{"id": server.model}]}),
                "/version": json.dumps({"version": "0.32.0"}),
                "/metrics": server.metrics(),
            }
            self.answer(200 if self.path in pages else 404, pages.get(self.path, ""))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if server.refuse:
                self.answer(400, json.dumps({"error": {"message": server.refuse}}))
                return
            server.generate(body | {"path": self.path, "authorization": self.headers.get("Authorization")})
            self.answer(200, json.dumps({"choices": [{"text": "x"}]}))

        def answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            return

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{httpd.server_port}"
    try:
        yield server
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()
