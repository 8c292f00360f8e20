"""What is built and installed."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import gradwire
from gradwire.version import __version__, described
from tests.support.source import PACKAGES, ROOT, SRC


def test_there_is_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["hatch"]["version"]["path"] == "src/gradwire/version.py"
    assert "version" not in project["project"]
    assert gradwire.__version__ == __version__
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", __version__)


def test_in_a_clone_the_commit_is_told() -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert re.fullmatch(rf"{re.escape(__version__)}, commit {commit}(-dirty)?", described())


def test_one_address_of_the_repository_is_all_that_site_and_package_wait_for() -> None:
    conf = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    page = "[a list](../benchmarks/results/sweep.jsonl), [a folder](../examples), [a page](advise.md)"
    apart = "a list (`benchmarks/results/sweep.jsonl`), a folder (`examples`), [a page](advise.md)"
    assert conf["linked"](page, "advise", None) == apart
    assert conf["linked"](page, "advise", "https://host/o/gradwire") == (
        "[a list](https://host/o/gradwire/blob/main/benchmarks/results/sweep.jsonl), "
        "[a folder](https://host/o/gradwire/blob/main/examples), [a page](advise.md)"
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project.get("urls", {}).get("Source")
    assert conf["SOURCE"] == address
    assert (address is None) == ("repository-code" not in (ROOT / "CITATION.cff").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "link", "there"),
    [
        ("advise", "../benchmarks/results/README.md#so-far", "results/README.md#so-far"),
        ("papers/covap", "../../benchmarks/results/2026-11-25-covap.md", "../results/2026-11-25-covap.md"),
        ("papers/covap", "../choosing.md#all-recipes", "../choosing.md#all-recipes"),
        ("results/README", "2026-11-25-covap.md", "2026-11-25-covap.md"),
        ("results/README", "../../docs/engineering/costs.md#ways", "../engineering/costs.md#ways"),
        ("results/README", "../../docs/pictures/loss.svg", "../pictures/loss.svg"),
        ("advise", "../examples/ddp.py", "../examples/ddp.py"),
    ],
)
def test_reports_are_in_the_site_and_links_to_and_from_them_stay_in_it(
    name: str, link: str, there: str
) -> None:
    conf = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    assert conf["linked"](f"[a]({link})", name, None) == f"[a]({there})"


def package_files() -> set[str]:
    """Everything in the packages that git knows or would take."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src"],
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
        for path in SRC.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert present == package_files()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of this tree."""
    pytest.importorskip("hatchling", reason="the wheel is built by hatchling, which is not installed here")
    folder = tmp_path_factory.mktemp("wheel")
    run("-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=ROOT)
    (built,) = folder.glob("*.whl")
    return built


def run(*words: str, **options: Any) -> str:
    """What this interpreter prints."""
    command = [sys.executable, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.rest
def test_wheel_holds_types_and_data(wheel: Path) -> None:
    assert wheel.name.startswith(f"gradwire-{__version__}-")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert package_files() <= names
    # The vendored data have licences of their own: their texts come along, and the expression names them.
    metadata = zipfile.ZipFile(wheel).read(f"gradwire-{__version__}.dist-info/METADATA").decode()
    assert "\nLicense-Expression: Apache-2.0 AND MIT AND CC-BY-2.5\n" in metadata
    licences = {name.partition("/licenses/")[2] for name in names if "/licenses/" in name}
    assert licences == {"LICENSE", "src/gradwire_lab/data/vendored/ATTRIBUTION.md"}


@pytest.mark.rest
def test_commands_of_the_laboratory_run_where_the_wheel_is_installed(wheel: Path, tmp_path: Path) -> None:
    run("-m", "pip", "install", "--no-deps", "--no-index", "--target", str(tmp_path), str(wheel))
    there: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(tmp_path)}}
    found = run("-c", "import gradwire_lab; print(gradwire_lab.__file__)", **there)
    assert found.strip() == str(tmp_path / "gradwire_lab" / "__init__.py")
    assert "usage: gradwire demo" in run("-m", "gradwire", "demo", "-h", **there).lower()


def test_the_citation_has_the_version_and_the_five_papers() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {__version__}\n" in citation
    assert citation.count("\n  - type: ") == 5
