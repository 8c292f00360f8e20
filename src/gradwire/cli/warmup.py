"""`gradwire warmup`: compile kernels now, so that no training waits for them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

import typer
from rich.console import Console

from gradwire.cli.completion import recipe_names


def warmup(
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Compile only kernels that this recipe may call: topk, mergecomp(inner='int8').",
            autocompletion=recipe_names,
        ),
    ] = None,
) -> None:
    """Compile kernels and keep them for later processes on machines like this one.

    It compiles all kernels, which takes a minute or two, or those of one recipe. Run it once for each version
    of gradwire, Numba and Python.
    """
    from gradwire.kernels import compiler  # which loads torch
    from gradwire.kernels.cpu.cache import places, writable

    try:
        subjects = compiler.every() if recipe is None else _subjects_of(recipe)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    console = Console(highlight=False)
    folder = writable()
    if folder is None:
        tried = ", ".join(map(str, places()))
        console.print(f"nothing can be written to {tried}; set NUMBA_CACHE_DIR", soft_wrap=True)
        raise typer.Exit(1)
    with console.status("compiling kernels"):
        compiler.prepare(subjects)
    console.print(f"compiling took {compiler.compiled_s():.0f} s; kernels are in {folder}", soft_wrap=True)


def _subjects_of(text: str) -> Collection[str]:
    """Those that the recipe, and all that it may choose, have imported when they are built."""
    from gradwire.kernels import compiler
    from gradwire.recipes import recipe as named

    built = named(text).build()
    for candidate in () if built.next is None else built.next.candidates:
        named(candidate).build()
    return compiler.imported()
