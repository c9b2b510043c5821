"""The consistency checker: does a checkpoint fit its own config, and a draft its target?

:func:`hybridspec.check` runs it; :mod:`hybridspec.checkpoints.codes` explains what it can find.
"""
