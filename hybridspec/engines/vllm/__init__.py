"""A proposer of ours inside vLLM."""
