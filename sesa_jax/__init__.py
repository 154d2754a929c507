"""SESA in JAX: self-play that poses, solves and remembers."""

__version__ = "0.1.0"
