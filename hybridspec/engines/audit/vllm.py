"""The audit of an offline vLLM engine."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hybridspec.engines.audit.cases import AS_GIVEN, Case
from hybridspec.engines.audit.coverage import Coverage, read_coverage
from hybridspec.engines.audit.engine import Engine, EngineFailedError
from hybridspec.engines.audit.verdict import NEAR_TIE, Status, TokenComparison, compare
from hybridspec.errors import InputError

#: As many of the likeliest tokens as vLLM tells by default.
LOGPROBS = 20
#: custom_class runs on this runner only, so the run that it is compared with does, too.
V1_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}


@dataclass(frozen=True)
class Prompts:
    """What to generate from: half of ``prefix``, then each of ``texts``, cut to about ``tokens`` tokens."""

    texts: list[str]
    prefix: str
    tokens: int
    new_tokens: int


@dataclass(frozen=True)
class Finding:
    """One row of the report.

    Args:
        case: the situation.
        run: ``plain`` (without speculation, compared with the first plain run), ``oracle`` or the method's name.
        error: what the engine said, if it failed.
    """

    case: str
    run: str
    status: Status
    comparison: TokenComparison | None = None
    coverage: Coverage | None = None
    acceptance: dict[str, Any] | None = None
    error: str | None = None

    @property
    def bad(self) -> bool:
        return self.status in ("corrupt", "failed")

    def to_dict(self) -> dict[str, Any]:
        comparison = self.comparison
        return {
            "case": self.case,
            "run": self.run,
            "status": self.status,
            "tokens_compared": comparison.compared if comparison else 0,
            "divergences": [asdict(d) for d in comparison.divergences] if comparison else [],
            "coverage": self.coverage.to_dict() if self.coverage else None,
            "acceptance": self.acceptance,
            "error": self.error,
        }


class Audit:
    """Runs cases on an engine.

    Args:
        k: most drafted tokens.
        near_tie: largest margin of a near tie; None: what the engine's dtype makes of it.
        report: told what runs, for a progress display.

    Attributes:
        about: version, dtype and kind of the engine, after the first run.
    """

    def __init__(
        self, engine: Engine, prompts: Prompts, k: int, near_tie: float | None, report: Callable[[str], None]
    ) -> None:
        self.engine, self.prompts, self.k, self.report = engine, prompts, k, report
        self.near_tie = near_tie
        self.about: dict[str, Any] = {}
        self._first: dict[str, Any] | None = None

    def run(self, cases: Sequence[Case], speculative: dict[str, Any] | None) -> list[Finding]:
        """All findings, in order.

        Raises:
            InputError: the target does not run without speculation in any case.
        """
        findings: list[Finding] = []
        for case in cases:
            findings += self._oracle(case)
        if speculative is not None:
            findings += self._given(speculative)
        if self._first is None:
            raise InputError(f"the target does not run without speculation either: {findings[0].error}")
        return findings

    def _oracle(self, case: Case) -> list[Finding]:
        plain, found = self._plain(case, V1_RUNNER)
        if plain is None:
            return [found]
        log = self.engine.folder / f"oracle-{case.name.replace(' ', '-')}.jsonl"
        log.unlink(missing_ok=True)
        oracle = log.with_suffix(".json")
        sequences = [[[*p, *g], len(p)] for p, g in zip(plain["prompts"], plain["rounds"][0], strict=True)]
        oracle.write_text(json.dumps({"sequences": sequences, "ragged": case.ragged, "log": str(log)}))
        self.report(f"{case.name}: oracle")
        overrides = case.overrides | {
            "speculative_config": {
                "method": "custom_class",
                "model": "hybridspec_audit_oracle.Oracle",
                "num_speculative_tokens": self.k,
            },
            "additional_config": {"hybridspec_audit": str(oracle)},
        }
        try:
            answer = self._run(f"{case.name} oracle", case, overrides, V1_RUNNER)
        except EngineFailedError as error:
            return [found, Finding(case.name, "oracle", "failed", error=str(error))]
        comparison = self._compare(plain, answer)
        coverage = read_coverage(log, self.k)
        return [found, Finding(case.name, "oracle", comparison.status, comparison, coverage)]

    def _given(self, speculative: dict[str, Any]) -> list[Finding]:
        case = Case(AS_GIVEN)
        runner = V1_RUNNER if speculative.get("method") == "custom_class" else {}
        plain, found = self._plain(case, runner)
        if plain is None:
            return [found]
        method = str(speculative.get("method", "draft_model"))
        self.report(f"{AS_GIVEN}: {method}")
        try:
            answer = self._run(f"{AS_GIVEN} {method}", case, {"speculative_config": speculative}, runner)
        except EngineFailedError as error:
            return [found, Finding(AS_GIVEN, method, "failed", error=str(error))]
        name = answer["method"] or method
        if name != method:
            name = f"{name}, not {method} as asked"
        comparison = self._compare(plain, answer)
        return [found, Finding(AS_GIVEN, name, comparison.status, comparison, acceptance=answer["counters"])]

    def _plain(self, case: Case, runner: dict[str, str]) -> tuple[dict[str, Any] | None, Finding]:
        """The answer without speculation, and how it compares with that of the first case."""
        self.report(f"{case.name}: without speculation")
        try:
            answer = self._run(f"{case.name} plain", case, dict(case.overrides), runner, LOGPROBS)
        except EngineFailedError as error:
            return None, Finding(case.name, "plain", "not possible", error=str(error))
        if self._first is None:
            self._first = answer
            self.about = {name: answer[name] for name in ("version", "dtype", "hybrid")}
            if self.near_tie is None:
                self.near_tie = NEAR_TIE.get(answer["dtype"], max(NEAR_TIE.values()))
        comparison = self._compare(self._first, answer)
        return answer, Finding(case.name, "plain", comparison.status, comparison)

    def _run(
        self, name: str, case: Case, overrides: dict[str, Any], runner: dict[str, str], logprobs: int = 0
    ) -> dict[str, Any]:
        self.engine.environment.clear()
        self.engine.environment.update(runner)
        prompts = self.prompts
        given = (
            {"prompts": self._first["prompts"]}
            if self._first
            else {"texts": prompts.texts, "prefix": prompts.prefix, "prompt_tokens": prompts.tokens}
        )
        return self.engine.run(
            name,
            overrides=overrides,
            new_tokens=prompts.new_tokens,
            rounds=case.rounds,
            logprobs=logprobs,
            **given,
        )

    def _compare(self, plain: dict[str, Any], answer: dict[str, Any]) -> TokenComparison:
        """Every round of ``answer`` with the first of ``plain``."""
        rounds = answer["rounds"]
        expected, tops = plain["rounds"][0], plain["logprobs"]
        return compare(
            expected * len(rounds), tops * len(rounds), [tokens for part in rounds for tokens in part], self.near_tie
        )
