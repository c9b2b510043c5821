"""What runs inside the engine's own Python, which need not have hybridspec: nothing here imports it."""
