"""One decoder, described by data; one small file a family."""
