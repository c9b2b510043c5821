"""Makes a small draft of a target's own architecture: cut some of its layers out, then teach them its distributions.

``hybridspec distill`` is the command, :func:`hybridspec.drafts.distillation.distill.distill` the same from Python.
"""
