"""Where results go, looked at before the minutes that they take."""

from pathlib import Path


def check_folder(*paths: Path | None) -> None:
    """Raise `ValueError` for a file that could not be written because its folder does not exist.

    >>> check_folder(None, Path("out.json"))
    """
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"{path}: the folder {path.parent} does not exist")
