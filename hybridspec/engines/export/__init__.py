"""Settings for serving engines, from what was tuned or asked for, and refusals where an engine would get it wrong."""
