"""The options of one generation, which everything below :func:`hybridspec.decode` passes on whole."""

from dataclasses import dataclass

import torch

from hybridspec.decoding.acceptance import Verification
from hybridspec.decoding.draft_length import DraftLength, FixedLength
from hybridspec.decoding.sampling import Sampling
from hybridspec.decoding.verifier import Verifier, WholeBlock

PLAIN = FixedLength(0)


@dataclass(frozen=True)
class DecodeOptions:
    """How a prompt is decoded, whatever drafts for it.

    Attributes:
        length: the draft-length rule; it may learn while it is used. The default is plain decoding.
        verification: when sampling, ``token`` (rejection sampling token by token) or ``block``.
        verifier: how the target passes over a block.
        generator: of all random numbers; None is torch's own.
        stop_tokens: ids that end the generation; None: those of the target.
    """

    length: DraftLength = PLAIN
    max_new_tokens: int = 128
    sampling: Sampling = Sampling()
    verification: Verification = "token"
    verifier: Verifier = WholeBlock()
    generator: torch.Generator | None = None
    stop_tokens: frozenset[int] | None = None
