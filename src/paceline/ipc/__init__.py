"""The engine in a process of its own, and the link to it. Loads no torch in the client's process."""
