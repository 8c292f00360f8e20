"""What is built and installed."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import gradwire
from gradwire.version import __version__
from tests.support.source import ROOT, SRC


def test_there_is_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["hatch"]["version"]["path"] == "src/gradwire/version.py"
    assert "version" not in project["project"]
    assert gradwire.__version__ == __version__
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", __version__)


def package_files() -> set[str]:
    """Everything in the package that git knows or would take."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src/gradwire"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return {str(Path(line).relative_to("src")) for line in listed.splitlines() if (ROOT / line).exists()}


def test_nothing_that_the_package_needs_is_ignored() -> None:
    # The build leaves out what git ignores: vendored data must not match a pattern by chance.
    present = {
        str(path.relative_to(SRC))
        for path in (SRC / "gradwire").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert present == package_files()


@pytest.mark.rest
def test_wheel_holds_types_and_data(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="the wheel is built by hatchling, which is not installed here")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"gradwire-{__version__}-")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "gradwire/py.typed" in names
    assert package_files() <= names
    # The vendored data have licences of their own: their texts come along, and the expression names them.
    metadata = zipfile.ZipFile(wheel).read(f"gradwire-{__version__}.dist-info/METADATA").decode()
    assert "\nLicense-Expression: Apache-2.0 AND MIT AND CC-BY-2.5\n" in metadata
    licences = {name.partition("/licenses/")[2] for name in names if "/licenses/" in name}
    assert licences == {"LICENSE", "src/gradwire/lab/data/vendored/ATTRIBUTION.md"}


def test_the_citation_has_the_version_and_the_five_papers() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {__version__}\n" in citation
    assert citation.count("\n  - type: ") == 5
