"""The one exception that a command turns into a line for its user."""


class CoterieError(Exception):
    """What was expected, what was found, what to do next: one line, no traceback."""
