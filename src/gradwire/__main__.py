"""`python -m gradwire`: the command line where the script is not on the path."""

from gradwire.cli.start import start

start()
