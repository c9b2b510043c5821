"""Draft strategies and draft-length rules, over the bases in :mod:`hybridspec.drafts.base`.

The names below load on first use: a strategy brings the model library with it.
"""

from importlib import import_module

_WHERE = {
    "Draft": "hybridspec.drafts.base",
    "Drafting": "hybridspec.drafts.base",
    "Proposal": "hybridspec.drafts.base",
    "SameArchitectureDraft": "hybridspec.drafts.same_architecture",
    "FullAttentionDraft": "hybridspec.drafts.full_attention.strategy",
    "PromptLookupDraft": "hybridspec.drafts.prompt_lookup",
    "MultiTokenPredictionDraft": "hybridspec.drafts.mtp.strategy",
    "DraftLength": "hybridspec.drafts.length",
    "FixedLength": "hybridspec.drafts.length",
    "SVIP": "hybridspec.drafts.length.entropy",
    "AdaEDL": "hybridspec.drafts.length.entropy",
    "ExpectedGain": "hybridspec.drafts.length.expected_gain",
    "Bandit": "hybridspec.drafts.length.bandit",
    "make_draft": "hybridspec.drafts.registry",
    "make_length": "hybridspec.drafts.registry",
}
__all__ = list(_WHERE)


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'hybridspec.drafts' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
