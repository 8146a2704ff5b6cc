"""Carries out steps on a clock instead of a device."""
