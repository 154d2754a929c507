"""What the solver remembers: skills, and the bank that holds them."""
