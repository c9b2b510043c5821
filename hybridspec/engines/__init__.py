"""Serving engines: what they support, settings for them, an audit of them, and a proposer for vLLM."""
