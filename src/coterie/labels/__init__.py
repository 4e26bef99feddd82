"""Label privacy around the mechanisms: tables with noisy labels, their loss specifications, and learners."""
