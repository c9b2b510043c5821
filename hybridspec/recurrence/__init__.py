"""The mathematics of each mixer family: a verify pass over a short block, its tape, and the closed-form rollback.

Pure functions on tensors; nothing here knows a model, a cache or transformers.
"""
