"""Reports from a profile alone: plots, one self-contained page, and two profiles side by side."""
