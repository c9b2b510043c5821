"""The support matrix: what engines do with a pair, by draft method, each entry with the version it was read from.

A rule is a condition on the facts of a pair; of an engine's rules for one method, the first that holds counts.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hybridspec.checkpoints.findings import Finding

Verdict = Literal["works", "refused", "wrong", "not as asked", "slow"]
TRANSFORMERS = "transformers 5.16-5.24"
VLLM = "vLLM 0.33.0"
SGLANG = "SGLang 0.5.23"
LLAMA_CPP = "llama.cpp 2026-10"
MLX = "mlx-lm 0.32.2"
EXLLAMA = "exllamav3 1.6.5"

MAMBA_1 = frozenset({"mamba", "falcon_mamba", "jamba", "zamba"})
#: Without a rollback in transformers' own assisted generation, by its own check.
CROPPABLE = frozenset({"lfm2", "lfm2_moe", "lfm3", "inkling_text", "inkling2_text", "inkling2_loop_text"})
#: Were in vLLM and are no longer -> the version that removed them.
REMOVED_FROM_VLLM = {"bamba": "0.23.0", "minimax": "0.23.0", "minimax_text_01": "0.23.0", "plamo2": "0.26.0"}
#: A draft of these model types is rewritten to its own prediction head.
REWRITTEN_BY_VLLM = ("qwen3_next", "qwen3_5", "qwen4_exp")
VLLM_MTP = ("qwen3_next", "qwen3_5", "qwen4_exp", "nemotron_h", "bailing_hybrid")
LLAMA_CPP_PLANES = ("qwen3_5", "qwen4_exp", "glm5_next", "nemotron_h", "lfm2", "bailing_hybrid", "deepseek_v4")
LLAMA_CPP_WITHOUT = (
    "qwen3_next",
    "jamba",
    "falcon_h1",
    "granitemoehybrid",
    "mamba",
    "mamba2",
    "falcon_mamba",
    "kimi_linear",
    "minimax",
)
EXLLAMA_RUNS = ("qwen3_next", "qwen3_5", "kimi_linear", "bailing_hybrid", "nemotron_h", "lfm2")
EXLLAMA_LACKS = ("jamba", "falcon_h1", "granitemoehybrid", "zamba2", "zamba")
#: Mixers whose windows or states vLLM on a CPU does not take back.
WRONG_ON_CPU = frozenset({"SSD (Mamba-2)", "short convolution"})

PLUGIN = "custom_class with hybridspec.vllm_plugin.HybridDraftProposer, or a dense draft of the same tokenizer"
OURS = "hybridspec.enable_assisted_generation(model), or hybridspec's own decode"


@dataclass(frozen=True)
class Facts:
    """What the rules look at.

    Attributes:
        hybrid, draft_hybrid: some layer keeps a state or a window.
        mixers, draft_mixers: recurrences and convolutions, by tensors.
        head: the target announces a prediction head and has its tensors.
        vocabularies: vocab_size of both.
        tokens_agree: the tokenizers are the same; None if unknown.
    """

    model_type: str
    hybrid: bool
    mixers: frozenset[str]
    head: bool = False
    draft_type: str | None = None
    draft_hybrid: bool = False
    draft_mixers: frozenset[str] = frozenset()
    draft_head: bool = False
    vocabularies: tuple[int | None, int | None] = (None, None)
    tokens_agree: bool | None = None

    def target_is(self, *types: str) -> bool:
        return self.model_type.startswith(types)

    def draft_is(self, *types: str) -> bool:
        return bool(self.draft_type) and self.draft_type.startswith(types)

    @property
    def sizes_differ(self) -> bool:
        a, b = self.vocabularies
        return a is not None and b is not None and a != b


@dataclass(frozen=True)
class Rule:
    """``draft`` says whether the rule is about a draft model (True), needs none (False)."""

    engine: str
    version: str
    method: str
    holds: Callable[[Facts], bool]
    verdict: Verdict
    text: str
    instead: str = ""
    draft: bool = True


@dataclass(frozen=True)
class Support:
    """What an engine does with a pair by one method."""

    engine: str
    version: str
    method: str
    verdict: Verdict
    text: str
    instead: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _always(facts: Facts) -> bool:
    return True


RULES: tuple[Rule, ...] = (
    # transformers: read and run.
    Rule(
        "transformers",
        TRANSFORMERS,
        "assistant_model",
        lambda f: f.hybrid and f.model_type == "minimax",
        "refused",
        "generate raises 'Assisted decoding requires a cache'.",
        OURS,
    ),
    Rule(
        "transformers",
        TRANSFORMERS,
        "assistant_model",
        lambda f: f.hybrid and f.model_type not in CROPPABLE,
        "refused",
        "generate raises 'assisted generation is not supported with stateful models'.",
        OURS,
    ),
    Rule(
        "transformers",
        TRANSFORMERS,
        "assistant_model",
        lambda f: f.draft_hybrid and f.draft_type not in CROPPABLE,
        "not as asked",
        "A recurrent assistant is never rolled back: a quarter to nine tenths of its drafts came from a stale state.",
        OURS,
    ),
    Rule("transformers", TRANSFORMERS, "assistant_model", _always, "works", "One sequence at a time."),
    Rule(
        "transformers",
        TRANSFORMERS,
        "prompt_lookup",
        lambda f: f.hybrid and f.model_type not in CROPPABLE,
        "refused",
        "generate raises 'assisted generation is not supported with stateful models'.",
        OURS,
        draft=False,
    ),
    Rule("transformers", TRANSFORMERS, "prompt_lookup", _always, "works", "One sequence at a time.", draft=False),
    # vLLM: read and, on a CPU, run.
    *(
        Rule(
            "vllm",
            VLLM,
            method,
            lambda f: f.model_type in REMOVED_FROM_VLLM,
            "refused",
            "Its model class was removed (bamba and minimax in 0.23.0, plamo2 in 0.26.0).",
            "hybridspec's own runner, or an older vLLM without speculation",
            draft=method == "draft_model",
        )
        for method in ("draft_model", "ngram", "mtp")
    ),
    *(
        Rule(
            "vllm",
            VLLM,
            method,
            lambda f: f.model_type in MAMBA_1,
            "wrong",
            "Mamba-1 states are not rolled back, and no check refuses it: rejected tokens stay in the state.",
            "hybridspec's own runner, or vLLM without speculation",
            draft=method == "draft_model",
        )
        for method in ("draft_model", "ngram")
    ),
    Rule(
        "vllm",
        VLLM,
        "draft_model",
        lambda f: f.sizes_differ and not f.draft_is(*REWRITTEN_BY_VLLM),
        "refused",
        "Target and draft must have the same vocab_size, padding included.",
        "pad the smaller embedding to the larger size, or use_heterogeneous_vocab (greedy, V1 runner)",
    ),
    Rule(
        "vllm",
        VLLM,
        "draft_model",
        lambda f: f.draft_is(*REWRITTEN_BY_VLLM) or (f.draft_is("nemotron_h") and f.draft_head),
        "not as asked",
        "The draft's config is rewritten to its prediction head (mtp): loading fails, or drafts are bad.",
        PLUGIN,
    ),
    Rule(
        "vllm",
        VLLM,
        "draft_model",
        lambda f: f.draft_hybrid,
        "refused",
        "V1 runner: 'All drafting layers should belong to the same kv cache group'; V2 never rolls the draft back.",
        PLUGIN,
    ),
    Rule(
        "vllm",
        VLLM,
        "draft_model",
        lambda f: f.tokens_agree is False,
        "not as asked",
        "It starts, because only sizes are compared; the ids mean other tokens, and almost nothing is accepted.",
        "a draft with the target's tokenizer",
    ),
    Rule(
        "vllm",
        VLLM,
        "draft_model",
        lambda f: f.hybrid and bool(f.mixers & WRONG_ON_CPU),
        "works",
        "On GPU, with --no-enable-prefix-caching and few draft layers. On a CPU its outputs are wrong for this mixer.",
    ),
    Rule(
        "vllm",
        VLLM,
        "draft_model",
        lambda f: f.hybrid,
        "works",
        "With --no-enable-prefix-caching, and a draft of few layers (all in one cache group on the V1 runner).",
    ),
    Rule("vllm", VLLM, "draft_model", _always, "works", ""),
    Rule(
        "vllm",
        VLLM,
        "mtp",
        lambda f: f.head and f.target_is(*VLLM_MTP),
        "works",
        "With --no-enable-prefix-caching, which together with mtp has a record of wrong outputs on hybrids.",
        draft=False,
    ),
    Rule(
        "vllm",
        VLLM,
        "ngram",
        lambda f: f.hybrid and bool(f.mixers & WRONG_ON_CPU),
        "works",
        "On GPU, with --no-enable-prefix-caching. On a CPU its outputs are wrong for this mixer.",
        draft=False,
    ),
    Rule(
        "vllm",
        VLLM,
        "ngram",
        lambda f: f.hybrid,
        "works",
        "With --no-enable-prefix-caching; before 0.33.0 it corrupts gated-delta states.",
        draft=False,
    ),
    Rule("vllm", VLLM, "ngram", _always, "works", "", draft=False),
    # Others: read.
    Rule(
        "sglang",
        SGLANG,
        "STANDALONE",
        lambda f: f.sizes_differ,
        "refused",
        "Target and draft must have the same vocab_size.",
        "pad the smaller embedding to the larger size",
    ),
    Rule(
        "llama.cpp",
        LLAMA_CPP,
        "draft-simple",
        lambda f: f.head and f.target_is(*LLAMA_CPP_PLANES),
        "slow",
        "Rejected tokens are taken back from a checkpoint in host memory, with a new pass over the accepted ones.",
        "draft-mtp",
    ),
    Rule(
        "llama.cpp",
        LLAMA_CPP,
        "draft-simple",
        lambda f: f.target_is(*LLAMA_CPP_PLANES, *LLAMA_CPP_WITHOUT),
        "slow",
        "Rejected tokens are taken back from a checkpoint in host memory, with a new pass over the accepted ones.",
        "hybridspec's own runner",
    ),
    Rule(
        "llama.cpp",
        LLAMA_CPP,
        "draft-mtp",
        lambda f: f.head and f.target_is(*LLAMA_CPP_PLANES),
        "works",
        "Its memory keeps planes to return to.",
        draft=False,
    ),
    Rule(
        "mlx-lm",
        MLX,
        "draft model",
        lambda f: f.hybrid or f.draft_hybrid,
        "refused",
        "'Speculative decoding requires a trimmable prompt cache'.",
        "hybridspec's own runner",
    ),
    Rule(
        "exllamav3",
        EXLLAMA,
        "draft model",
        lambda f: f.hybrid and f.target_is(*EXLLAMA_LACKS),
        "refused",
        "The architecture has no rollback there.",
        "hybridspec's own runner",
    ),
    Rule(
        "exllamav3",
        EXLLAMA,
        "draft model",
        lambda f: f.hybrid and f.target_is(*EXLLAMA_RUNS) and (not f.draft_hybrid or f.draft_is(*EXLLAMA_RUNS)),
        "works",
        "Two state rows per sequence, whatever K is.",
    ),
)
#: Verdict -> code of a finding.
CODES = {"refused": "HS601", "wrong": "HS602", "not as asked": "HS603"}
ENGINES = tuple(dict.fromkeys(rule.engine for rule in RULES))


def support(facts: Facts) -> list[Support]:
    """What each engine does with the pair, or with the target alone if there is no draft."""
    found: dict[tuple[str, str], Support] = {}
    for rule in RULES:
        key = rule.engine, rule.method
        if key in found or (rule.draft and facts.draft_type is None) or not rule.holds(facts):
            continue
        found[key] = Support(rule.engine, rule.version, rule.method, rule.verdict, rule.text, rule.instead)
    return list(found.values())


def engine_findings(rows: list[Support], asked: str | None, paired: bool) -> list[Finding]:
    """One finding per engine that fails with a draft model; an error or warning for the engine that was asked for."""
    found = []
    for row in rows:
        code = CODES.get(row.verdict)
        # Without a draft, methods that need none say what speculation the target allows.
        about_pair = row.method in {"draft_model", "assistant_model", "STANDALONE", "draft model"}
        if code is None or (paired and not about_pair):
            continue
        severity = "note" if row.engine != asked else "warning" if row.verdict == "not as asked" else "error"
        seen = f"{row.version}, {row.method}: {row.text}"
        action = f"What works instead: {row.instead}." if row.instead else ""
        found.append(Finding(code, "pair" if paired else "target", seen, severity=severity, action=action))
    return found
