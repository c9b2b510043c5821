"""What vLLM would accept and then get wrong, or die of: never exported, each with what happens and what works instead.

The support matrix of the checker says what vLLM does with a pair; the rules here add what depends on the version, the
device, the model runner and the draft length. Rules are read from vLLM's source or were seen to happen.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hybridspec.engines.export.draft_method import DraftMethod, from_method
from hybridspec.engines.export.key_sets import KeySet
from hybridspec.engines.export.models import ExportedModel, ExportedPair
from hybridspec.engines.support import listed, support

Device = Literal["gpu", "cpu"]
Runner = Literal["v1", "v2"]
GATED_DELTA = "gated delta rule"
#: Methods that the support matrix judges by the same rules about the target.
MATRIX_ROW = {"suffix": "ngram", "custom_class": "ngram"}
#: Methods that only the V1 runner has.
V1_ONLY = listed("vllm_v1_only")
#: Methods that it lets Qwen4Exp have (``models/config.py`` of 0.32 and 0.33).
QWEN4_EXP = listed("vllm_qwen4_exp")
VLLM_MTP = listed("vllm_mtp")
WRONG_ON_CPU = frozenset(listed("wrong_on_cpu"))
OWN_RUNNER = "hybridspec's own runner"


@dataclass(frozen=True)
class Refusal:
    """``what`` happens with ``method`` in ``version``, and what works ``instead``."""

    version: str
    method: str
    what: str
    instead: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.version}, {self.method}: {self.what} Instead: {self.instead}."


@dataclass(frozen=True)
class Serving:
    """Where and how: ``sequences`` is ``max_num_seqs``, None leaves it to vLLM."""

    keys: KeySet
    device: Device = "gpu"
    runner: Runner = "v2"
    prefix_caching: bool = False
    sequences: int | None = None
    synthetic: bool = False


@dataclass(frozen=True)
class Case:
    models: ExportedPair
    proposal: DraftMethod
    serving: Serving

    @property
    def target(self) -> ExportedModel:
        return self.models.target

    @property
    def method(self) -> str | None:
        return self.proposal.method

    @property
    def hybrid(self) -> bool:
        return self.models.facts.hybrid

    @property
    def cpu(self) -> bool:
        return self.serving.device == "cpu"

    @property
    def old(self) -> bool:
        return self.serving.keys.release < (0, 33)

    @property
    def gated_delta(self) -> bool:
        return GATED_DELTA in self.models.recurrent_mixers


@dataclass(frozen=True)
class RefusalRule:
    holds: Callable[[Case], bool]
    what: Callable[[Case], str] | str
    instead: Callable[[Case], str] | str


def refuse(models: ExportedPair, proposal: DraftMethod, serving: Serving) -> Refusal | None:
    """Why a proposal must not be exported; None if nothing is known against it.

    Rules about the target alone hold for plain decoding too.
    """
    case = Case(models, proposal, serving)
    for rules in (TARGET_RULES, () if proposal.method is None else (*_matrix(case), *RULES)):
        for rule in rules:
            if rule.holds(case):
                what, instead = (part if isinstance(part, str) else part(case) for part in (rule.what, rule.instead))
                return Refusal(serving.keys.name, proposal.asked, what, instead)
    return None


def _matrix(case: Case) -> tuple[RefusalRule, ...]:
    """The checker's verdict about this method, if it is not good."""
    method = MATRIX_ROW.get(case.method, case.method)
    rows = [row for row in support(case.models.facts) if row.engine == "vllm" and row.method == method]
    return tuple(
        RefusalRule(lambda _: True, row.text, row.instead) for row in rows if row.verdict not in ("works", "slow")
    )


def in_one_group(target: ExportedModel, draft: ExportedModel) -> bool:
    """Whether the V1 runner puts all layers of a draft into one KV cache group, as it demands.

    Layers of one shape of cache form a bucket, and buckets are cut into groups as large as the smallest bucket, or the
    largest if that is less than 1.5 times as large (``v1/core/kv_cache_utils.py`` of 0.32, ``kv_cache_planning.py``
    of 0.33). Whether draft and target share a bucket depends on their page sizes too, so it must fit either way.
    """
    count = draft.attention_layers
    sizes = [size for size in (target.recurrent_layers, target.attention_layers) if size]
    ways = [[*sizes, count]]
    if draft.attention == target.attention:
        ways.append([target.recurrent_layers, target.attention_layers + count])
    for buckets in ways:
        least, most = min(buckets), max(buckets)
        size = most if most < 1.5 * least else least
        # A bucket is dealt out to its groups layer by layer, so one draft layer is always together.
        if count > 1 and buckets[-1] > size:
            return False
    return True


def _supported(case: Case) -> bool:
    return not case.target.architectures or bool(set(case.target.architectures) & set(case.serving.keys.architectures))


def _removed(case: Case) -> str | None:
    table = case.serving.keys.removed
    return next((table[name] for name in case.target.architectures if name in table), None)


def _mamba_1(case: Case) -> bool:
    return any(mixer and "Mamba-1" in mixer for mixer in case.target.mixers)


def _without_head(case: Case) -> str:
    """What drafts without a prediction head, and is not refused itself."""
    lookup = from_method("ngram", case.proposal.k, None, False, None)
    return "--method ngram" if refuse(case.models, lookup, case.serving) is None else OWN_RUNNER


TARGET_RULES: tuple[RefusalRule, ...] = (
    RefusalRule(
        lambda c: _removed(c) is not None,
        lambda c: f"{c.target.architectures[0]} was served until {_removed(c)}; its model class is gone.",
        f"{OWN_RUNNER}, or a vLLM that still had it, without speculation",
    ),
    RefusalRule(
        lambda c: c.hybrid and not _supported(c),
        lambda c: (
            f"It has no class for {c.target.architectures[0]}, and its fallback to transformers refuses layers that "
            "are not attention."
        ),
        OWN_RUNNER,
    ),
    RefusalRule(
        lambda c: c.cpu and _mamba_1(c),
        "Its CPU build has no selective scan: the first step fails ('_C' has no attribute 'selective_scan_fwd').",
        f"{OWN_RUNNER}, or a GPU without speculation",
    ),
    RefusalRule(
        lambda c: c.cpu and c.gated_delta and (c.target.linear_head or 64) < 64,
        lambda c: f"Its CPU kernels take linear heads of 64 and more; this model's are {c.target.linear_head}.",
        f"a GPU, or {OWN_RUNNER}",
    ),
    RefusalRule(
        lambda c: c.cpu and c.hybrid and c.serving.prefix_caching and c.method is not None,
        "Prefix caching with speculation on a hybrid needs a GPU kernel: the first step fails with 'function' object "
        "is not subscriptable.",
        "leave --prefix-caching out",
    ),
    RefusalRule(
        lambda c: c.cpu and c.serving.synthetic,
        "Synthetic acceptance is not there on a CPU ('Synthetic acceptance not supported with CPU sampling').",
        "a GPU, or leave --synthetic out",
    ),
)

RULES: tuple[RefusalRule, ...] = (
    RefusalRule(
        lambda c: c.method not in c.serving.keys.methods,
        "It has no such method.",
        "another --vllm-version",
    ),
    RefusalRule(
        lambda c: c.serving.runner == "v2" and c.method in V1_ONLY,
        "Its V2 model runner does not have this method, and refuses to start.",
        "leave --runner out: vLLM takes V1 for it",
    ),
    RefusalRule(
        lambda c: c.target.model_type.startswith("qwen4_exp") and c.method not in QWEN4_EXP,
        "For Qwen4Exp it takes the model's own head and n-grams alone, and stops with 'Qwen4Exp speculative decoding "
        "supports only its native MTP checkpoint and linear n-gram proposers'.",
        lambda c: "--method mtp" if c.target.has_head else _without_head(c),
    ),
    # Drafts.
    RefusalRule(
        lambda c: c.method == "custom_class" and c.models.draft is not None and c.models.facts.sizes_differ,
        lambda c: "vocab_size is {} in the target and {} in the draft, and our proposer refuses that.".format(
            *c.models.facts.vocabularies
        ),
        "a draft of the target's vocabulary; hybridspec check TARGET DRAFT tells what differs",
    ),
    RefusalRule(
        lambda c: c.models.draft is not None and c.models.facts.tokens_agree is False,
        "Only sizes of vocabularies are compared; these tokenizers number tokens differently, so almost nothing is "
        "accepted.",
        "a draft with the target's tokenizer; hybridspec check TARGET DRAFT tells what differs",
    ),
    RefusalRule(
        lambda c: (
            c.method == "draft_model"
            and c.hybrid
            and c.serving.runner == "v1"
            and not in_one_group(c.target, c.models.draft)
        ),
        lambda c: (
            f"The {c.models.draft.attention_layers} layers of the draft fall into more than one KV cache group beside "
            f"the target's {c.target.recurrent_layers} recurrent and {c.target.attention_layers} attention layers: "
            "the V1 runner stops with 'All drafting layers should belong to the same kv cache group'."
        ),
        lambda c: (
            "a draft of one layer, or --method custom_class"
            + ("" if c.cpu else ", or the V2 runner (leave --runner out)")
        ),
    ),
    # The prediction head.
    RefusalRule(
        lambda c: c.method == "mtp" and not c.target.model_type.startswith(VLLM_MTP),
        lambda c: (
            f"No prediction head of {c.target.model_type} is known there ('Unsupported speculative method'); hybrids "
            f"with one are {', '.join(VLLM_MTP)}."
        ),
        _without_head,
    ),
    RefusalRule(
        lambda c: c.method == "mtp" and c.target.weights is None and not c.target.has_head,
        "Whether the head's tensors are there cannot be seen, for the weight files are not. Without those tensors vLLM "
        "stops ('weights were not initialized from checkpoint') or accepts nothing.",
        "run this where the whole checkpoint is",
    ),
    RefusalRule(
        lambda c: c.method == "mtp" and not c.target.has_head,
        "The checkpoint has no tensors of a prediction head: loading stops ('weights were not initialized from "
        "checkpoint'), or nothing is ever accepted. Quantised copies often lack them.",
        lambda c: f"a checkpoint with the head's tensors, or {_without_head(c)}",
    ),
    RefusalRule(
        lambda c: c.method == "mtp" and not c.target.heads and not c.target.model_type.startswith("qwen3_next"),
        "config.json announces no prediction head, though its tensors are there.",
        "the original config.json (mtp_num_hidden_layers or num_nextn_predict_layers)",
    ),
    RefusalRule(
        lambda c: c.method == "mtp" and c.proposal.k > (c.target.heads or 1) and c.proposal.k % (c.target.heads or 1),
        lambda c: f"K = {c.proposal.k} is no multiple of the {c.target.heads} heads of the checkpoint.",
        lambda c: f"--k {c.proposal.k // c.target.heads * c.target.heads}",
    ),
    # Rollback of the target.
    RefusalRule(
        lambda c: c.cpu and bool(c.models.recurrent_mixers & WRONG_ON_CPU),
        lambda c: (
            f"On a CPU, speculation on {' and '.join(sorted(c.models.recurrent_mixers & WRONG_ON_CPU))} gives wrong "
            "tokens from the second step on, without an error: the convolution's window is not rolled back."
        ),
        f"a GPU, or {OWN_RUNNER}, or vLLM without speculation",
    ),
    RefusalRule(
        lambda c: c.old and c.gated_delta and c.proposal.ragged,
        "On the gated delta rule, steps whose rows draft different numbers of tokens, or none, leave a stale state or "
        "stop ('The size of tensor a must match'), and this way of drafting has such steps.",
        lambda c: (
            "--vllm-version 0.33.0"
            + (", or --method mtp" if c.target.has_head else "")
            + ("" if c.proposal.draft is None else ", or a fixed K")
        ),
    ),
    RefusalRule(
        lambda c: c.cpu and c.old and c.gated_delta and (c.serving.sequences or 1) > 1,
        "On a CPU it is right for the gated delta rule with one sequence at a time only.",
        "--max-num-seqs 1, or --vllm-version 0.33.0",
    ),
)
