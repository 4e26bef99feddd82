"""One module per ``coterie`` command: plain functions with typer options, registered in ``coterie.cli``."""
