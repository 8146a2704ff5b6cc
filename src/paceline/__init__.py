"""Serve large language models at a promised pace."""
