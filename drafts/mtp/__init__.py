"""Drafting with the multi-token-prediction head of the target's own checkpoint."""

from hybridspec.drafts.mtp.strategy import MultiTokenPredictionDraft

__all__ = ["MultiTokenPredictionDraft"]
