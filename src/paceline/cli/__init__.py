"""The `paceline` command: one file a verb."""
