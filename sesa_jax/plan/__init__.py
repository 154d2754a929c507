"""Whether a run fits a machine, and what it costs, before one is booked."""
