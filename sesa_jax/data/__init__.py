"""Reads corpora, seeds and benchmark questions from files."""
