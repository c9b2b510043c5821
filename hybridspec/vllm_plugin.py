"""The name under which serve lines load the proposer; see :mod:`hybridspec.engines.vllm.proposer`."""

from hybridspec.engines.vllm.proposer import HybridDraftProposer

__all__ = ["HybridDraftProposer"]
