"""Measures engines as their users feel them, under service constraints, over HTTP or in process."""
