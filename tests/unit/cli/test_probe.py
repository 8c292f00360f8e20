"""What `gradwire probe` prints, draws and writes."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from gradwire.cli.main import app
from gradwire.cli.plot import Axes, Curve, text_plot
from gradwire.comm import ProcessGroupComm
from gradwire.measure.connections import Tried
from gradwire.measure.probe import Probed
from gradwire.planning.costs import Link
from gradwire.planning.links import straight_line

AXES = Axes("bytes", "ms")


def test_a_codec_is_measured_printed_and_written(tmp_path: Path) -> None:
    words = ["--codecs", "fp16", "--budget", "0.01", "--json", str(tmp_path / "a.json")]
    done = CliRunner().invoke(app, ["probe", *words])
    assert done.exit_code == 0, done.output
    assert "fp16, encode" in done.output
    codecs = json.loads((tmp_path / "a.json").read_text())["codecs"]
    assert list(codecs) == ["fp16"]
    for what in ("encode", "decode"):
        sizes, seconds = zip(*codecs["fp16"][what]["points"], strict=True)
        assert sizes[-1] == 2**20
        assert min(seconds) > 0.0


@pytest.mark.rest
def test_two_codecs_are_measured_printed_drawn_and_written(tmp_path: Path) -> None:
    options = ["--budget", "0.01", "--picture", str(tmp_path / "a.svg"), "--json", str(tmp_path / "a.json")]
    done = CliRunner().invoke(app, ["probe", "--codecs", "fp16;topk(ratio=0.05)", *options])
    assert done.exit_code == 0, done.output
    assert "topk(ratio=0.05), decode" in done.output
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["format"] == 1
    assert list(found["codecs"]) == ["fp16", "topk(ratio=0.05)"]
    assert found["codecs"]["fp16"]["encode"]["points"][-1][0] == 2**20
    assert "<svg" in (tmp_path / "a.svg").read_text()


@pytest.fixture
def _links(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is a rank of a world of one, and finds two links."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    fit = straight_line([(1e3, 2e-3 + 4e-5), (1e6, 2e-3 + 4e-2)])
    found = (Probed("all_reduce", Link(1e-3, 4e-8), fit), Probed("shift", Link(2e-3, 0.0), fit))
    monkeypatch.setattr("gradwire.measure.probe.probe", lambda *_comm, **_budget: found)
    tried = Tried(0.05, 1 << 20, {1: 0.4, 2: 0.2}, 2)
    monkeypatch.setattr("gradwire._api.connections.connect_more", lambda *_comms: tried)


@pytest.mark.usefixtures("_links")
def test_all_links_stand_in_the_table_and_in_the_file(tmp_path: Path) -> None:
    options = ["--picture", str(tmp_path / "a.png"), "--json", str(tmp_path / "a.json")]
    done = CliRunner().invoke(app, ["probe", *options])
    assert done.exit_code == 0, done.output
    out = done.output
    assert "all_reduce 1000 µs 200.0 Mbit/s" in " ".join(out.split())
    assert "beyond measure" in out
    assert "connections per link: 2 (round trip of 50.0 ms" in " ".join(out.split())
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["verbs"]["all_reduce"]["alpha_s"] == 1e-3
    assert document["connections"]["connections"] == 2
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("_links")
def test_other_ranks_say_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Second(ProcessGroupComm):
        def __init__(self, group: dist.ProcessGroup) -> None:
            super().__init__(group)
            self.rank = 1

    monkeypatch.setattr("gradwire.comm.ProcessGroupComm", Second)
    options = ["--picture", str(tmp_path / "a.png"), "--json", str(tmp_path / "a.json")]
    done = CliRunner().invoke(app, ["probe", *options])
    assert (done.exit_code, done.output) == (0, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--verbs", "all_reduce,scatter"], "choose from all_reduce"),
        (["--verbs", "broadcast"], "choose from all_reduce"),
        (["--verbs", "shift,all_reduce/tree"], "a link needs ranks"),
        ([], "gradwire probe --nproc 2"),
        (["--check"], "gradwire probe --nproc 2"),
        (["--verbs", "all_reduce", "--codecs", "fp16"], "codecs, not links"),
        (["--nproc", "2", "--codecs", "fp16"], "codecs, not links"),
        (["--codecs", "covap"], "decides only after measuring"),
        (["--codecs", "topkk"], "did you mean"),
    ],
)
def test_what_cannot_be_probed_is_refused_with_a_reason(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    done = CliRunner().invoke(app, ["probe", *words])
    assert done.exit_code == 2
    assert said in done.output


@pytest.mark.parametrize("words", [["--check"], ["--verbs", "all_reduce,shift", "--budget", "0.5"]])
def test_ranks_that_it_starts_do_what_was_asked(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []

    def execv(_program: str, line: list[str]) -> NoReturn:
        became.append(line)
        raise SystemExit(0)

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("os.execv", execv)
    done = CliRunner().invoke(app, ["probe", "--nproc", "2", *words])
    assert done.exit_code == 0, done.output
    [line] = became
    assert line[-len(words) - 5 :] == ["--nproc-per-node", "2", "-m", "gradwire", "probe", *words]


def test_points_lie_at_the_ends_of_both_axes() -> None:
    fit = straight_line([(1.0, 1e-3), (10.0, 1e-2), (100.0, 1e-1)])
    lines = text_plot([Curve("a", fit), Curve("b", fit)], AXES, width=21, height=11).split("\n")
    grid = [line.partition("|")[2].ljust(21) for line in lines[:-1]]
    assert grid[0][20] == grid[5][10] == grid[10][0] == "+"  # the second curve lies on the first
    assert lines[0].startswith(" 100 |")
    assert lines[10].startswith("   1 |")
    assert lines[-1].endswith("o a  + b")


def test_a_flat_line_and_a_single_size_can_be_drawn() -> None:
    assert text_plot([Curve("a", straight_line([(1.0, 1e-3), (8.0, 1e-3)]))], AXES).count("o") == 2 + 1
    assert text_plot([Curve("a", straight_line([(4.0, 1e-3)]))], AXES).count("o") == 1 + 1
