"""The process that ranks are forked from imports what they need while pytest collects the tests."""

from multiprocessing import forkserver

import tests.support.ranks  # says what to import  # noqa: F401

forkserver.ensure_running()
