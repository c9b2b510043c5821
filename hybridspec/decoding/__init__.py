"""The speculative loop: what a draft proposes, what the target keeps of it, and how tokens are chosen."""
