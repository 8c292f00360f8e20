"""The demonstration's document as one self-contained HTML page."""

from gradwire.lab.report.render import render

__all__ = ["render"]
