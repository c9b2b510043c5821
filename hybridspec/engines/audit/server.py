"""The audit of a running server, from outside: vLLM's OpenAI interface and its metrics.

A server that drafts cannot be told to stop drafting for one request. What can be done without it: a prompt with its
output behind it goes through one prefill, in which nothing is drafted and no state is taken back, and the server
tells the log probabilities there. Each token of a greedy output must be the likeliest one or tie with it.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hybridspec.engines.audit.verdict import Divergence, TokenComparison
from hybridspec.engines.server_metrics import ServerCounters, prefix_caching
from hybridspec.errors import InputError


class Server:
    """An OpenAI-compatible server.

    Args:
        url: with or without ``/v1`` at its end.
        model: as the server calls it; None: the first one.
        key: sent as a bearer token.

    Raises:
        InputError: nothing answers there, or not as such a server.
    """

    def __init__(self, url: str, model: str | None = None, key: str | None = None, seconds: float = 300.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise InputError(f"{url}: give a URL such as http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.key, self.seconds = key, seconds
        models = json.loads(self._get("/v1/models"))["data"]
        names = [entry["id"] for entry in models]
        if model is not None and model not in names:
            raise InputError(f"{self.url} serves no {model!r}, but {', '.join(names)}")
        self.model = model or names[0]

    def complete(self, prompt: str | list[int], **options: Any) -> dict[str, Any]:
        """The first choice of a greedy completion."""
        body = {"model": self.model, "prompt": prompt, "temperature": 0, **options}
        return json.loads(self._get("/v1/completions", body))["choices"][0]

    def generate(self, prompt: str | list[int], new_tokens: int) -> tuple[list[int], list[int]]:
        """Token ids of the prompt and of its greedy continuation."""
        choice = self.complete(prompt, max_tokens=new_tokens, ignore_eos=True, return_token_ids=True)
        if not choice.get("token_ids") or not choice.get("prompt_token_ids"):
            raise InputError(f"{self.url} tells no token ids (return_token_ids): it needs vLLM 0.32 or later")
        return choice["prompt_token_ids"], choice["token_ids"]

    def score(self, tokens: list[int]) -> list[dict[int, float]]:
        """For each token, id -> log probability: of that token and of the likeliest ones, from one prefill."""
        choice = self.complete(tokens, max_tokens=1, prompt_logprobs=20)
        rows = choice.get("prompt_logprobs")
        if rows is None:
            raise InputError(
                f"{self.url} tells no prompt_logprobs, so its outputs cannot be checked without --reference"
            )
        return [{int(token): entry["logprob"] for token, entry in (row or {}).items()} for row in rows]

    def metrics(self) -> str:
        """The text of ``/metrics``, empty where there is none."""
        try:
            return self._get("/metrics")
        except InputError:
            return ""

    def version(self) -> str | None:
        try:
            return json.loads(self._get("/version")).get("version")
        except (InputError, ValueError):
            return None

    def _get(self, path: str, body: dict[str, Any] | None = None) -> str:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.seconds) as response:
                return response.read().decode()
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:500]
            raise InputError(f"{self.url}{path}: {error.code} {error.reason}: {text}") from error
        except (OSError, ValueError) as error:
            raise InputError(f"{self.url}{path}: {error}. Is a server running there?") from error


@dataclass(frozen=True)
class ServerFinding:
    """One check. ``comparison`` is None where the server could not tell."""

    check: str
    comparison: TokenComparison


@dataclass(frozen=True)
class ServerReport:
    """What was found; ``warnings`` are combinations with a record of silent corruption."""

    version: str | None
    model: str
    findings: list[ServerFinding]
    counters: ServerCounters
    prefix_caching: bool | None
    warnings: list[str]

    @property
    def bad(self) -> bool:
        return any(f.comparison.status == "corrupt" for f in self.findings)

    def to_dict(self) -> dict[str, Any]:
        from dataclasses import asdict

        checks = [
            {
                "check": f.check,
                "status": f.comparison.status,
                "tokens_compared": f.comparison.compared,
                "divergences": [asdict(d) for d in f.comparison.divergences],
            }
            for f in self.findings
        ]
        return {
            "version": self.version,
            "model": self.model,
            "checks": checks,
            "acceptance": self.counters.to_dict(),
            "prefix_caching": self.prefix_caching,
            "warnings": self.warnings,
        }


def audit_server(
    server: Server,
    prompts: Sequence[str],
    new_tokens: int,
    batch: int,
    near_tie: float,
    reference: Server | None = None,
    hybrid: bool | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> ServerReport:
    """Generates from ``prompts`` one at a time and ``batch`` together, and checks every token by a prefill.

    Args:
        near_tie: largest margin of a near tie.
        reference: a server of the same target without speculation, to compare with as well.
        hybrid: whether the target is one, for warnings; None if unknown.
    """
    before = ServerCounters.read(server.metrics())
    report("one at a time")
    single = [server.generate(p, new_tokens) for p in prompts]
    report(f"{batch} together")
    with ThreadPoolExecutor(batch) as pool:
        together = list(pool.map(lambda p: server.generate(p, new_tokens), prompts))
    counters = ServerCounters.read(server.metrics()).since(before)
    findings = []
    for name, outputs in (("one at a time", single), (f"{batch} together", together)):
        report(f"{name}: scoring by prefill")
        scored = [server.score([*prompt, *tokens])[len(prompt) :] for prompt, tokens in outputs]
        findings.append(ServerFinding(f"{name}: greedy by a prefill", check_greedy(outputs, scored, near_tie)))
    if reference is not None:
        report("reference")
        truth = [reference.generate(prompt, new_tokens)[1] for prompt, _ in single]
        scores = [reference.score([*p, *t])[len(p) :] for (p, _), t in zip(single, truth, strict=True)]
        for name, outputs in (("one at a time", single), (f"{batch} together", together)):
            findings.append(ServerFinding(f"{name}: equal to --reference", against(truth, scores, outputs, near_tie)))
    caching = prefix_caching(server.metrics())
    return ServerReport(server.version(), server.model, findings, counters, caching, warn(counters, caching, hybrid))


def warn(counters: ServerCounters, caching: bool | None, hybrid: bool | None) -> list[str]:
    """Combinations with a record, and what keeps the audit from saying more."""
    warnings = []
    if not counters.drafts:
        warnings.append("nothing was drafted, so nothing was tested: is speculation on, and /metrics reachable?")
    if caching and hybrid is not False and counters.drafts:
        kind = "a hybrid target" if hybrid else "the target, if it is a hybrid"
        warnings.append(
            f"prefix caching with speculation on {kind}: corrupted silently in several versions of vLLM "
            "(issues 43559, 47194, 53912); start it with --no-enable-prefix-caching"
        )
    return warnings


def check_greedy(
    outputs: Sequence[tuple[list[int], list[int]]], scored: Sequence[Sequence[dict[int, float]]], near_tie: float
) -> TokenComparison:
    """Every generated token against the likeliest one of a prefill over the same tokens before it.

    The first that is not a near tie counts, else the one with the largest margin.
    """
    divergences, compared = [], 0
    for number, ((_, tokens), rows) in enumerate(zip(outputs, scored, strict=True)):
        found = []
        for position, (token, row) in enumerate(zip(tokens, rows, strict=True)):
            best = max(row, key=row.__getitem__)
            if row[best] > row[token]:
                found.append(Divergence(number, position, best, token, row[best] - row[token]))
        compared += len(tokens)
        wrong = next((d for d in found if d.margin > near_tie), None)
        if found:
            divergences.append(wrong or max(found, key=lambda d: d.margin))
    return TokenComparison(divergences, compared, near_tie)


def against(
    truth: Sequence[list[int]],
    scores: Sequence[Sequence[dict[int, float]]],
    outputs: Sequence[tuple[list[int], list[int]]],
    near_tie: float,
) -> TokenComparison:
    """Compares outputs with those of a reference, whose likeliest tokens give the margin."""
    from hybridspec.engines.audit.verdict import compare

    tops = [[{str(token): value for token, value in row.items()} for row in rows] for rows in scores]
    return compare(truth, tops, [tokens for _, tokens in outputs], near_tie)
