"""The support matrix: facts that were read from engines, as verdicts about pairs."""

import pytest

from hybridspec import check
from hybridspec.engines.support import PairFacts, engine_findings, matrix, support
from tests.checkpoints import checkpoints

__all__ = ["checkpoints"]

GDN = frozenset({"gated delta rule"})
QWEN = PairFacts("qwen3_5_text", True, GDN)


def verdict(facts: PairFacts, engine: str, method: str) -> str | None:
    return next((row.verdict for row in support(facts) if (row.engine, row.method) == (engine, method)), None)


def pair(target: str, draft: str, **changes) -> PairFacts:
    dense = {"qwen3", "llama"}
    facts = {
        "hybrid": target not in dense,
        "mixers": frozenset(),
        "draft_type": draft,
        "draft_hybrid": draft not in dense,
        "vocabularies": (100, 100),
        "tokens_agree": True,
    }
    return PairFacts(target, **(facts | changes))


@pytest.mark.parametrize(
    ("facts", "engine", "method", "expected"),
    [
        (pair("qwen3_5_text", "qwen3_5_text"), "transformers", "assistant_model", "refused"),
        (pair("qwen3_5_text", "qwen3"), "transformers", "assistant_model", "refused"),
        (pair("minimax", "qwen3"), "transformers", "assistant_model", "refused"),
        (pair("lfm2", "lfm2"), "transformers", "assistant_model", "works"),
        (pair("qwen3", "qwen3_5_text"), "transformers", "assistant_model", "not as asked"),
        (pair("qwen3", "lfm2"), "transformers", "assistant_model", "works"),
        (pair("qwen3_5_text", "qwen3_5_text"), "vllm", "draft_model", "not as asked"),
        (pair("qwen3_next", "qwen3_5_text"), "vllm", "draft_model", "not as asked"),
        (pair("nemotron_h", "nemotron_h"), "vllm", "draft_model", "refused"),
        (pair("nemotron_h", "nemotron_h", draft_head=True), "vllm", "draft_model", "not as asked"),
        (pair("granitemoehybrid", "granitemoehybrid"), "vllm", "draft_model", "refused"),
        (pair("qwen3_5_text", "qwen3"), "vllm", "draft_model", "works"),
        (pair("qwen3_5_text", "qwen3", vocabularies=(100, 128)), "vllm", "draft_model", "refused"),
        (pair("qwen3_5_text", "qwen3", tokens_agree=False), "vllm", "draft_model", "not as asked"),
        (pair("jamba", "qwen3"), "vllm", "draft_model", "wrong"),
        (pair("jamba", "qwen3"), "vllm", "ngram", "wrong"),
        (pair("zamba2", "qwen3"), "vllm", "draft_model", "works"),
        (pair("mamba2", "qwen3"), "vllm", "ngram", "works"),
        (pair("bamba", "qwen3"), "vllm", "draft_model", "refused"),
        (pair("qwen3", "qwen3"), "vllm", "draft_model", "works"),
        (pair("qwen3_5_text", "qwen3", vocabularies=(100, 128)), "sglang", "STANDALONE", "refused"),
        (pair("qwen3_5_text", "qwen3"), "mlx-lm", "draft model", "refused"),
        (pair("falcon_h1", "qwen3"), "exllamav3", "draft model", "refused"),
        (pair("qwen3_5_text", "qwen3_5_text"), "exllamav3", "draft model", "works"),
        (PairFacts("qwen3_5_text", True, GDN, head=True), "vllm", "mtp", "works"),
        (QWEN, "vllm", "mtp", None),
        (QWEN, "vllm", "draft_model", None),
        (QWEN, "transformers", "prompt_lookup", "refused"),
    ],
)
def test_verdicts(facts: PairFacts, engine: str, method: str, expected: str | None) -> None:
    assert verdict(facts, engine, method) == expected


def test_each_entry_names_its_version_and_each_failure_what_works_instead() -> None:
    for rule in matrix():
        assert any(character.isdigit() for character in rule.version), rule
        assert rule.instead or rule.verdict == "works", rule


def test_a_failure_is_a_note_unless_the_engine_was_asked_for() -> None:
    rows = support(pair("qwen3_5_text", "qwen3_5_text"))
    assert {f.severity for f in engine_findings(rows, None, True)} == {"note"}
    asked = {f.seen.split(",")[0]: f.severity for f in engine_findings(rows, "vllm", True)}
    assert asked["vLLM 0.33.0"] == "warning" and set(asked.values()) == {"warning", "note"}
    asked = engine_findings(support(pair("jamba", "qwen3")), "vllm", True)
    assert [f.code for f in asked if f.severity == "error"] == ["HS602"]


def test_a_real_pair(checkpoints) -> None:
    report = check(checkpoints("granitemoehybrid"), checkpoints("granitemoehybrid"), engine="vllm")
    refused = [f for f in report.errors if f.code == "HS601"]
    assert len(refused) == 1 and "kv cache group" in refused[0].seen and "HybridDraftProposer" in refused[0].action
    assert report.exit_status() == 1
    dense = check(checkpoints("granitemoehybrid"), checkpoints("qwen3"), engine="vllm")
    assert not [f for f in dense.errors if f.code.startswith("HS6")]
