"""The start of the command. Nothing but this file is imported before Ctrl-C is handled."""

import sys


def start() -> None:
    """Run the command line; after Ctrl-C end with exit code 130 and a line instead of a traceback."""
    try:
        from gradwire.cli.main import app

        app(prog_name="gradwire")
    except KeyboardInterrupt:
        print("gradwire: interrupted", file=sys.stderr)
        sys.exit(130)
