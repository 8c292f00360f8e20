"""Version, and how to install: both change with a release, and are written here alone."""

__version__ = "0.2.0.dev0"

EXTRA = "pip install '.[{}]' in a copy of gradwire's source"
"""How to install gradwire with an extra. No release is published: there is no name to install by."""


def described() -> str:
    """The version, and the commit of the source it runs from, where that is known: "0.2.0.dev0, commit
    0c0d6fe7-dirty".

    The commit is known in a clone, and where pip has installed from one.
    """
    import json  # the command's start imports this file, and may not wait for these
    import subprocess
    from importlib.metadata import PackageNotFoundError, distribution
    from pathlib import Path

    root, commit = Path(__file__).parents[2], ""
    try:
        if (root / ".git").exists():
            command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
            commit = done.stdout.strip()
        else:
            told = json.loads(distribution("gradwire").read_text("direct_url.json") or "{}")
            commit = told.get("vcs_info", {}).get("commit_id", "")[:8]
    except (OSError, subprocess.TimeoutExpired, PackageNotFoundError):
        pass
    return f"{__version__}, commit {commit}" if commit else __version__
