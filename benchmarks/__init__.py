"""Measurements of the package's parts beside a peer each; see README.md."""
