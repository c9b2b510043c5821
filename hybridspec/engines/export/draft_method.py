"""A way of drafting in vLLM's terms, from a tuned configuration or from what a user asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from hybridspec.errors import InputError
from hybridspec.specs import STRATEGIES, split_options

Method = Literal["draft_model", "mtp", "ngram", "suffix", "custom_class"]
METHODS: tuple[str, ...] = get_args(Method)
PROPOSER = "hybridspec.vllm_plugin.HybridDraftProposer"
#: N-gram lengths of this package's prompt lookup; vLLM's own defaults (5 and 5) match less often.
LONGEST, SHORTEST = 4, 2


@dataclass(frozen=True)
class DraftMethod:
    """What drafts, and how much.

    Attributes:
        method: vLLM's name; None is plain decoding.
        k: most tokens at a time.
        draft: folder of the draft model, if there is one.
        keys: further keys of ``--speculative-config``.
        plugin: settings of our proposer (``additional_config["hybridspec"]``).
        ragged: rows of a batch may get drafts of different lengths, or none.
        notes: what vLLM does otherwise than the tuned configuration.
    """

    method: Method | None
    k: int = 0
    draft: str | None = None
    keys: Mapping[str, object] = field(default_factory=dict)
    plugin: Mapping[str, object] = field(default_factory=dict)
    ragged: bool = False
    notes: tuple[str, ...] = ()

    @property
    def asked(self) -> str:
        """How a user would name it."""
        return self.method or "plain decoding"


PLAIN = DraftMethod(None)


class NotServable(Exception):
    """A draft that vLLM has no place for; ``instead`` says what works."""

    def __init__(self, text: str, instead: str) -> None:
        super().__init__(text)
        self.text, self.instead = text, instead


def from_method(method: str | None, k: int, draft: str | None, hybrid_draft: bool, length: str | None) -> DraftMethod:
    """What a user named by a method and a draft folder. A draft without a method takes what can serve it.

    Args:
        hybrid_draft: some layer of the draft keeps a state.
        length: a draft-length rule, which only our proposer follows.

    Raises:
        InputError: options that do not go together.
    """
    adaptive = length is not None and not length.strip().isdecimal()
    if method is None:
        if draft is None:
            raise InputError("give --draft FOLDER, or --method mtp, ngram or suffix")
        method = "custom_class" if hybrid_draft or adaptive else "draft_model"
    if method not in METHODS:
        raise InputError(f"unknown method {method!r}: choose one of {', '.join(METHODS)}")
    if (draft is None) == (method in ("draft_model", "custom_class")):
        needs = "needs --draft FOLDER" if draft is None else "takes no --draft"
        raise InputError(f"method {method!r} {needs}")
    if adaptive and method != "custom_class":
        raise InputError(f"method {method!r} follows no draft-length rule: leave --length out, or give --draft alone")
    if method == "ngram":
        return _ngram(k, LONGEST, SHORTEST)
    if method == "custom_class":
        return _ours(draft, k, length if adaptive else None, draft=draft)
    return DraftMethod(method, k, draft, ragged=method == "suffix")


def has_model(spec: str) -> bool:
    """Whether a draft, as configurations name it, is a model of its own: a folder alone, or a strategy with one."""
    name = spec.partition(":")[0]
    return name == "same-architecture" or (bool(name) and name not in STRATEGIES.names())


def from_configuration(
    configuration: Mapping[str, object], k: int, folder: str | None, hybrid_draft: bool
) -> DraftMethod:
    """What a tuned configuration is in vLLM.

    Args:
        configuration: as profiles hold it: ``draft``, ``length``, ``segments``, ``verification``.
        k: most tokens that its rule drafts at once.
        folder: of the draft model, for strategies that have one.

    Raises:
        NotServable: it is nothing there.
    """
    length = str(configuration["length"])
    if length == "0":
        return PLAIN
    name, _, text = str(configuration["draft"]).partition(":")
    fixed = length.isdecimal()
    rule = None if fixed else length
    if folder is not None and has_model(str(configuration["draft"])):
        if hybrid_draft or not fixed:
            proposal = _ours(folder, k, rule, draft=folder)
        else:
            proposal = DraftMethod("draft_model", k, folder)
    elif name == "prompt-lookup":
        options = {key or "longest": value for _, key, value in split_options(text)}
        window = options.pop("window", "0")
        longest, shortest = int(options.get("longest", LONGEST)), int(options.get("shortest", SHORTEST))
        if fixed and window == "0":
            proposal = _ngram(k, longest, shortest)
        else:
            proposal = _ours(str(configuration["draft"]), k, rule, ragged=True)
    elif name == "mtp":
        proposal = _mtp(text, k, rule)
    elif name == "full-attention":
        raise NotServable(
            "A full-attention draft runs the target's own layers with a part left out, which vLLM lets no proposer do.",
            "tune with another draft (--draft FOLDER, prompt-lookup, mtp), or serve with hybridspec's own runner",
        )
    else:
        raise NotServable(
            f"vLLM has nothing that drafts as {name!r} does.",
            "tune with same-architecture, prompt-lookup or mtp, or serve with hybridspec's own runner",
        )
    notes = list(proposal.notes)
    if configuration.get("segments"):
        notes.append("vLLM verifies each block in one pass: what segmented verification gained is not to be had there.")
    if configuration.get("verification") == "block":
        notes.append("Block verification is not exported: with greedy drafts it keeps what token verification keeps.")
    return DraftMethod(
        proposal.method, k, proposal.draft, proposal.keys, proposal.plugin, proposal.ragged, tuple(notes)
    )


def _ngram(k: int, longest: int, shortest: int) -> DraftMethod:
    keys = {"prompt_lookup_max": longest, "prompt_lookup_min": shortest}
    return DraftMethod("ngram", k, keys=keys, ragged=True)


def _ours(spec: str, k: int, length: str | None, draft: str | None = None, ragged: bool = False) -> DraftMethod:
    plugin = {"draft": spec} | ({"length": length} if length else {})
    return DraftMethod("custom_class", k, draft, {"model": PROPOSER}, plugin, ragged or length is not None)


def _mtp(text: str, k: int, rule: str | None) -> DraftMethod:
    if any(key in (None, "path") for _, key, _ in split_options(text)):
        raise NotServable(
            "The head comes from another folder than the target; it was tuned that way, and vLLM reads it from the "
            "target's.",
            "put the mtp.* tensors beside the target's weights and into its index, and tune with --draft mtp",
        )
    if rule is not None:
        raise NotServable(
            f"The head reads the target's hidden states, which vLLM gives its own mtp alone, and that follows no rule "
            f"such as {rule}.",
            "a fixed K: hybridspec export vllm --target TARGET --method mtp --k K",
        )
    return DraftMethod("mtp", k)
