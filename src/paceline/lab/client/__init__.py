"""The load client: sends a stage's requests when they are due and logs every byte that comes back, with its time."""
