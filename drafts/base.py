"""What other packages build draft strategies and draft-length rules on; it is defined with the loop, in
:mod:`hybridspec.decoding`.
"""

from hybridspec.decoding.draft import Draft, Drafting, Proceed
from hybridspec.decoding.draft_length import DraftLength
from hybridspec.decoding.proposal import Proposal
from hybridspec.decoding.sampling import Sampling
from hybridspec.decoding.step import Step

__all__ = ["Draft", "DraftLength", "Drafting", "Proceed", "Proposal", "Sampling", "Step"]
