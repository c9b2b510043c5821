"""What runs the models for a study: our own runner, an offline vLLM engine, a running server."""
