"""Finding and running iproute2 and util-linux, with errors that carry the tool's own words."""

import shutil
import subprocess
from collections.abc import Sequence

# Ordinary users often lack the sbin directories in their PATH although they may run what is in there.
_SBIN = "/usr/sbin:/sbin:/usr/local/sbin:/usr/bin:/bin"


def find(tool: str) -> str | None:
    """Path of `ip`, `tc` or `unshare`, or None."""
    return shutil.which(tool) or shutil.which(tool, path=_SBIN)


class ToolFailed(OSError):
    """`ip` or `tc` refused; the text is what it printed."""


def batch(tool: str, lines: Sequence[str]) -> None:
    """Run many `ip` or `tc` commands by one process, stopping at the first that fails."""
    path = find(tool)
    if path is None:
        raise ToolFailed(f"{tool} (iproute2) is not installed")
    text = "".join(line + "\n" for line in lines)
    done = subprocess.run([path, "-batch", "-"], input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ToolFailed(f"{tool}: {done.stderr.strip() or done.returncode}")
