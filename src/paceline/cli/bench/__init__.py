"""`paceline bench`: one file a verb."""
