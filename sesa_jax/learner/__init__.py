"""What turns episodes into better weights."""
