"""What noise, and what guarantee: numpy, scipy and dp-accounting only; one mechanism per file."""
