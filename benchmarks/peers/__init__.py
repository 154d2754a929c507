"""Other engines on the same work, each run in an environment of its own."""
