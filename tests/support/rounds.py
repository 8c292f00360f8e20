"""Rounds that were announced, beside those that were issued."""

from __future__ import annotations

from dataclasses import replace

from gradwire.comm.base import Round


def allows(announced: Round, issued: Round) -> bool:
    """Whether `issued` is what `announced` has promised."""
    if not announced.at_most:
        return issued == announced
    shorter = replace(announced, numel=issued.numel, at_most=False)
    return issued == shorter and issued.numel <= announced.numel
