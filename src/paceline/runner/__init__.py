"""Carries out the engine's steps on a device."""
