"""What other packages build draft strategies on; it is defined with the loop, in :mod:`hybridspec.decoding.draft`."""

from hybridspec.decoding.draft import Draft, Drafting, Proceed
from hybridspec.decoding.proposal import Proposal

__all__ = ["Draft", "Drafting", "Proceed", "Proposal"]
