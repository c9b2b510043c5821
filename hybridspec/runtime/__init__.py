"""Models that run: how they are loaded, one sequence on them, compiled passes, CUDA graphs, packed weights."""
