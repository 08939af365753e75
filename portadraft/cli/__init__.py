"""The command line. Importing it loads no array library."""

from portadraft.cli.app import main

__all__ = ["main"]
