"""Judges answers: right, wrong or unknown."""
