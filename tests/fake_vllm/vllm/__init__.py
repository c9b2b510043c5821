"""One engine. A step takes 1 s and 0.25 s more for each drafted token of each row. Drafts are right for as many tokens
as RIGHT says, step after step of a sequence, whatever K is.
"""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

from vllm.sampling_params import SamplingParams

__version__ = "0.33.0"
RIGHT = (3, 0, 1, 3)
PLAIN_SECONDS, DRAFTED_SECONDS = 1.0, 0.25
now = 0.0
time.perf_counter = lambda: now


class Engine:
    def __init__(self, options):
        speculative = options.get("speculative_config") or {}
        self.k = speculative.get("num_speculative_tokens", 0)
        self.method = speculative.get("method")
        self.slots = options.get("max_num_seqs", 256)
        self.rows = {}
        self.drafts = self.drafted = 0
        self.accepted = [0] * self.k
        config = SimpleNamespace(dtype="torch.bfloat16")
        method = SimpleNamespace(method=self.method) if self.k else None
        self.vllm_config = SimpleNamespace(model_config=config, speculative_config=method)

    def add_request(self, name, prompt, params):
        assert name not in self.rows and prompt["prompt_token_ids"]
        self.rows[name] = SimpleNamespace(length=0, steps=0, most=params.max_tokens)

    def has_unfinished_requests(self):
        return bool(self.rows)

    def step(self):
        global now
        running = dict(list(self.rows.items())[: self.slots])
        drafting = [r for r in running.values() if r.length]
        now += PLAIN_SECONDS + DRAFTED_SECONDS * self.k * len(drafting)
        outputs = []
        for name, row in running.items():
            accepted = 0
            if row.length and self.k:
                accepted = min(self.k, RIGHT[row.steps % len(RIGHT)])
                row.steps += 1
                self.drafts, self.drafted = self.drafts + 1, self.drafted + self.k
                for i in range(accepted):
                    self.accepted[i] += 1
            row.length = min(row.most, row.length + 1 + accepted)
            tokens = SimpleNamespace(token_ids=[7] * row.length)
            outputs.append(SimpleNamespace(request_id=name, outputs=[tokens]))
            if row.length == row.most:
                del self.rows[name]
        return outputs


class LLM:
    def __init__(self, options):
        with open(os.environ["FAKE_VLLM_LOG"], "a") as log:
            log.write(json.dumps(options) + "\n")
        if options.get("seed") == 13:
            raise RuntimeError("Engine core initialization failed: seed 13 brings bad luck")
        if options.get("seed") == 14:
            Path(os.environ["FAKE_VLLM_LOG"]).with_name("pid.txt").write_text(str(os.getpid()))
            time.sleep(60)
        self.llm_engine = Engine(options)

    @classmethod
    def from_engine_args(cls, arguments):
        return cls(arguments.options)

    def get_metrics(self):
        engine = self.llm_engine
        if not engine.k:
            return []
        counts = {"drafts": engine.drafts, "draft_tokens": engine.drafted, "accepted_tokens": sum(engine.accepted)}
        found = [SimpleNamespace(name=f"vllm:spec_decode_num_{name}", value=n) for name, n in counts.items()]
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        return [*found, SimpleNamespace(name=name, values=list(engine.accepted))]


__all__ = ["LLM", "SamplingParams"]
