"""Each operation once as plain torch, the reference, then its fast versions."""
