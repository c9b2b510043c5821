"""The seam to transformers: which of its functions and classes is which recurrence."""
