"""Draft-length rules: one file each, over the base in :mod:`hybridspec.decoding.draft_length`."""

from hybridspec.decoding.draft_length import DraftLength, FixedLength
from hybridspec.decoding.step import Step

__all__ = ["DraftLength", "FixedLength", "Step"]
