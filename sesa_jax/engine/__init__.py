"""Plays episodes: slots, refill, pause and resume."""
