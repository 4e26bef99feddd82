"""The audit: what a curious server could rebuild from the updates that it receives."""
