"""The target drafts for itself with its full-attention layers, and the verify pass that is cut at them."""

from hybridspec.drafts.full_attention.strategy import FullAttentionDraft

__all__ = ["FullAttentionDraft"]
