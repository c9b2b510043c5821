"""Running OpenAI-compatible vLLM servers, measured from outside: what their K gives, and which would be better.

A server speculates with one K, and its counters say how many drafted tokens were accepted at each position. So the
tokens per step of every smaller K are known, but not how long its step takes. One server tells what a step may cost at
most for another K to be better. Several servers with different K, one of them perhaps without speculation, tell the
time of a step: a straight line over K through what was measured.
"""

import os
import random
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from hybridspec import embedded
from hybridspec.engines.audit.server import Server
from hybridspec.engines.server_metrics import ServerCounters
from hybridspec.errors import InputError
from hybridspec.tuning.backends.base import DraftSurvey, Progress, Survey
from hybridspec.tuning.backends.by_concurrency import entry, speed
from hybridspec.tuning.backends.request_loads import Load, Pooled, Round, paired
from hybridspec.tuning.config import TuneConfig
from hybridspec.tuning.configuration import PLAIN, Configuration
from hybridspec.tuning.decision import WORTHWHILE
from hybridspec.tuning.measurement import measurement_of
from hybridspec.tuning.profile import Profile
from hybridspec.tuning.profile_building import describe_acceptance, describe_result, profile_frame
from hybridspec.tuning.study import WorkloadResult
from hybridspec.tuning.workloads.sources import Prompt, find_workloads

#: What drafts in a server is not told by it.
DRAFT = "served"
#: Environment variable with the bearer token that servers ask for.
KEY = "OPENAI_API_KEY"
#: Seconds until the counters have what was answered.
SETTLE = 5.0
DONE = "every server was measured"


class MeasuredServer(Server):
    """``k``: its number of speculative tokens; 0 without speculation.

    Raises:
        InputError: nothing answers, or without the counters that are needed.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url, key=os.environ.get(KEY), seconds=3600.0)
        totals = self.totals()
        if totals.rows is None:
            raise InputError(
                f"{self.url}/metrics does not count steps (vllm:inter_token_latency_seconds): it must be vLLM, and "
                "started without --disable-log-stats"
            )
        self.k = len(totals.accepted)

    def totals(self) -> ServerCounters:
        return ServerCounters.read(self._get("/metrics"), self.model)

    def send(self, prompt: Prompt, **options: Any) -> None:
        """One request, until it is answered."""
        if prompt.messages:
            self._get("/v1/chat/completions", {"model": self.model, "messages": list(prompt.messages), **options})
        else:
            self._get("/v1/completions", {"model": self.model, "prompt": prompt.text, **options})

    def round(self, load: Load, indices: list[int]) -> tuple[Round, int]:
        """Sends prompts together; what the counters say of it, and how many requests of others came between."""
        s = load.settings
        options: dict[str, Any] = {"max_tokens": s.max_new_tokens, "temperature": s.temperature}
        given = {"top_k": s.top_k, "top_p": s.top_p, "seed": s.seed if s.temperature else None}
        options |= {name: value for name, value in given.items() if value is not None}
        before = self.totals()
        with ThreadPoolExecutor(len(indices)) as pool:
            sent = [pool.submit(self.send, load.prompts[i], **options) for i in indices]
            for index, answer in zip(indices, sent, strict=True):
                try:
                    answer.result()
                except InputError as error:
                    raise InputError(f"workload {load.workload}, prompt {load.ids[index]}: {error}") from error
        until = time.monotonic() + SETTLE
        while (span := self.totals().since(before)).requests < len(indices) and time.monotonic() < until:
            time.sleep(0.05)
        others = span.requests - len(indices)
        # Requests of a round share the time.
        seconds = span.decode_seconds / len(indices)
        tokens = span.tokens - span.requests
        return Round(seconds, span.rows, tokens, span.rows, span.drafts, span.drafted, span.accepted), others


class ServerStudy:
    """One load on all servers, interleaved round by round in random order."""

    def __init__(self, load: Load, servers: Mapping[int, MeasuredServer]) -> None:
        self.load, self.servers, self.name = load, servers, load.name
        self.rounds: dict[int, list[Round]] = {k: [] for k in servers}
        self.others = 0
        self.stopped: str | None = None

    def run(self, progress: Progress = lambda *_: None) -> None:
        rounds, order = self.load.rounds, random.Random(self.load.settings.seed)
        for server in self.servers.values():
            progress(f"K = {server.k}, first steps", 0.0)
            server.round(self.load, rounds[0])
        for number, indices in enumerate(rounds):
            for k in order.sample(list(self.servers), len(self.servers)):
                progress(f"round {number + 1} of {len(rounds)}, K = {k}", number / len(rounds))
                found, others = self.servers[k].round(self.load, indices)
                self.rounds[k].append(found)
                self.others += max(0, others)
        self.stopped = DONE

    def pooled(self) -> dict[int, Pooled]:
        """By K; empty unless every server has done a round."""
        whole = min(map(len, self.rounds.values()))
        pools = {k: Pooled.of(rounds[:whole]) for k, rounds in self.rounds.items()} if whole else {}
        if any(not p.rows or not p.seconds for p in pools.values()):
            raise InputError(f"{self.name}: nothing was generated after the first tokens. Raise --max-new-tokens.")
        return pools

    def result(self) -> WorkloadResult:
        """Samples where a server without speculation was measured, a survey where two servers were."""
        pools = self.pooled()
        if not pools:
            return WorkloadResult(self.name, self.load.settings, None, {})
        survey = survey_of(pools, self.load.concurrency) if len(pools) > 1 else None
        samples = {}
        if 0 in pools:
            whole = min(map(len, self.rounds.values()))
            labels = self.load.labels[:whole]
            plain = self.rounds[0][:whole]
            for k, rounds in self.rounds.items():
                if k:
                    samples[Configuration(DRAFT, str(k))] = paired(labels, plain, rounds[:whole])
        measurements = {c: measurement_of(s) for c, s in samples.items()}
        return WorkloadResult(
            self.name, self.load.settings, survey, samples, stopped=self.stopped, measurements=measurements
        )

    def row(self) -> dict[str, Any] | None:
        """The entry of a profile's table by concurrency; None as long as nothing was measured."""
        pools = self.pooled()
        if not pools:
            return None
        result = self.result()
        own = entry(result, DRAFT) if result.answer else self._without_plain(result, pools)
        own["measured"] = [describe_pool(k, pool, self.load.concurrency) for k, pool in sorted(pools.items())]
        own["by_k"] = by_k(pools, result.survey)
        own["reason"] += better(result.survey, pools, own["k"])
        if self.others:
            own["warnings"] = [
                f"{self.others} requests of others came between: they are in the counters too, and took time"
            ]
        return own

    def _without_plain(self, result: WorkloadResult, pools: Mapping[int, Pooled]) -> dict[str, Any]:
        """No speed-up is known. K is the fastest of those that run."""
        k = max(pools, key=lambda k: pools[k].tokens_per_second)
        longest = pools[max(pools)]
        row = {"k": k, "draft": DRAFT, "length": str(k), **speed(None, None)}
        acceptance = describe_acceptance(DraftSurvey.of(longest.counts, 0.0))
        row |= {"speedup": None, "acceptance": acceptance, "acceptance_length": pools[k].acceptance_length(k)}
        row["tokens_per_second"] = pools[k].tokens_per_second
        row["predicted"] = result.survey.predicted.get(Configuration(DRAFT, str(k))) if result.survey else None
        row["reason"] = self._words(k, pools[k])
        return row

    def _words(self, k: int, pool: Pooled) -> str:
        step = pool.row_seconds * self.load.concurrency
        tau = pool.acceptance_length(k)
        text = (
            f"K = {k} gives {tau:.2f} tokens per step of {step * 1e3:.1f} ms, {pool.tokens_per_second:.1f} tokens/s at "
            f"{self.load.concurrency} requests at a time"
        )
        if len(self.servers) > 1:
            return text
        shares = [f"K = {i} if one takes less than {breaks_even(pool, i, k):.0%}" for i in range(1, k)]
        return (
            f"{text}; no speculation would be faster if a step takes less than {1 / tau:.0%} of that"
            + "".join(f", {share}" for share in shares)
            + ". --url of a second server with another K, or without, tells which"
        )


class ServerTuning:
    """What one request asks of running servers. Nothing is kept for a second sitting: servers and their load change."""

    def __init__(self, config: TuneConfig) -> None:
        self.config = config
        self.servers: dict[int, MeasuredServer] = {}
        for server in map(MeasuredServer, config.engine.url):
            if server.k in self.servers:
                one = self.servers[server.k].url
                raise InputError(f"{one} and {server.url} both speculate with K = {server.k}: give servers that differ")
            self.servers[server.k] = server
        names = {server.model for server in self.servers.values()}
        if len(names) > 1:
            raise InputError(
                f"the servers serve different models: {', '.join(sorted(names))}. If they are one, start them with the "
                "same --served-model-name."
            )
        if not any(self.servers):
            raise InputError(
                f"{next(iter(self.servers.values())).url} does not speculate: there is no K to judge. Start it with "
                "--speculative-config (hybridspec export vllm writes one), or use --backend vllm."
            )
        settings = config.settings
        self.studies: list[ServerStudy] = []
        for workload in find_workloads(config.workloads or embedded.workload_files()):
            prompts = workload.choose(settings.prompts)
            own = {name: v for name in ("max_new_tokens", "temperature") if (v := getattr(workload, name)) is not None}
            each = settings.replaced(**own)
            for c in sorted(set(config.engine.concurrency or (1,))):
                load = Load(workload.name, c, tuple(p.id for p in prompts), tuple(prompts), each)
                self.studies.append(ServerStudy(load, self.servers))

    def profile(self) -> Profile:
        """What was measured by now."""
        urls = {k: server.url for k, server in sorted(self.servers.items())}
        first = next(iter(self.servers.values()))
        fingerprint = f"{first.model} at {' '.join(urls.values())}"
        target = {"name": first.model, "path": None, "fingerprint": fingerprint, "dtype": None}
        drafts = {DRAFT: {"name": DRAFT}}
        profile = profile_frame("server", target, drafts, self.config.settings, self.config.threads)
        profile["engine"] = {"version": first.version(), "urls": {str(k): url for k, url in urls.items()}}
        for workload in dict.fromkeys(s.load.workload for s in self.studies):
            studies = [s for s in self.studies if s.load.workload == workload]
            row = describe_result(studies[0].result(), target, drafts)
            rows = {str(s.load.concurrency): found for s in studies if (found := s.row()) is not None}
            row["complete"] = all(s.stopped for s in studies)
            row["by_concurrency"] = rows or None
            if rows:
                lowest = next(iter(rows.values()))
                row["reason"] = lowest["reason"]
                row["acceptance"] = {DRAFT: lowest["acceptance"]} if lowest["acceptance"] else {}
            profile["workloads"][workload] = row
        return Profile.model_validate(profile)


def line(pools: Mapping[int, Pooled]) -> tuple[float, float]:
    """Seconds of a row at K = 0, and what each drafted token adds: least squares over the servers."""
    ks = sorted(pools)
    slope, start = np.polyfit(ks, [pools[k].row_seconds for k in ks], 1)
    return float(start), float(slope)


def survey_of(pools: Mapping[int, Pooled], concurrency: int) -> Survey:
    """From two servers or more; without one that does not speculate, K = 0 is where the line leads.

    Raises:
        InputError: the line leads to no time at all, so that nothing can be said.
    """
    longest = max(pools)
    start, slope = line(pools)
    if start <= 0 or start + longest * slope <= 0:
        raise InputError(
            "the servers' step times do not grow with K in a way that tells that of another one: measure longer "
            "(--prompts, --max-new-tokens), on a machine that does nothing else"
        )
    cost = slope / start
    predicted = {PLAIN: 1.0}
    for k in range(1, longest + 1):
        predicted[Configuration(DRAFT, str(k))] = pools[longest].acceptance_length(k) / (1 + k * cost)
    survey = DraftSurvey.of(pools[longest].counts, cost)
    return Survey(start * concurrency, [1.0] * (longest + 1), {DRAFT: 0.0}, {DRAFT: survey}, predicted)


def breaks_even(pool: Pooled, k: int, deployed: int) -> float:
    """Share of the deployed step's time below which a step of ``k`` drafted tokens gives more tokens per second."""
    return pool.acceptance_length(k) / pool.acceptance_length(deployed)


def by_k(pools: Mapping[int, Pooled], survey: Survey | None) -> dict[str, dict[str, Any]]:
    """Every K up to the largest that runs: tokens per step, the break-even against the largest, and the prediction."""
    longest = max(pools)
    rows = {}
    for k in range(longest + 1):
        configuration = Configuration(DRAFT, str(k)) if k else PLAIN
        rows[str(k)] = {
            "acceptance_length": pools[longest].acceptance_length(k),
            "breaks_even_below": breaks_even(pools[longest], k, longest),
            "predicted": survey.predicted.get(configuration) if survey else None,
        }
    return rows


def better(survey: Survey | None, pools: Mapping[int, Pooled], chosen: int) -> str:
    """A K that no server runs, if it is predicted to win by more than 2 %."""
    if survey is None:
        return ""
    predicted = {int(c.length): value for c, value in survey.predicted.items()}
    best = max(predicted, key=predicted.__getitem__)
    if best in pools or predicted[best] <= predicted[chosen] * (1 + WORTHWHILE):
        return ""
    measured = "" if 0 in pools else ", drawn on to a step without speculation"
    name, other = (f"K = {k}" if k else "no speculation" for k in (best, chosen))
    times = predicted[best] / predicted[chosen]
    words = f"is predicted to be {times:.2f} times as fast as {other} (steps on a line over K{measured})"
    return f"; {name}, which no server runs, {words}"


def describe_pool(k: int, pool: Pooled, concurrency: int) -> dict[str, Any]:
    return {
        "k": k,
        "step_seconds": pool.row_seconds * concurrency,
        "acceptance_length": pool.acceptance_length(k),
        "tokens_per_second": pool.tokens_per_second,
        "drafts": pool.drafts,
        "draft_tokens": pool.drafted,
        "accepted_by_position": pool.accepted,
    }
