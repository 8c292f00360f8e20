"""The examples print what their heads say, on real ranks that are started as torchrun starts them."""

import multiprocessing
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import ROOT

pytestmark = pytest.mark.process

# Those of frameworks are run by tests/integrations.
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("[!w]*.py"))
GUARD_S = 60.0


def torchrun(world: int, script: str, *arguments: str, folder: Path, nodes: int = 1) -> str:
    """What `torchrun … examples/SCRIPT …` prints, with `world` ranks in all; fails when one does."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    forked = multiprocessing.get_context("forkserver")
    ranks = [
        forked.Process(
            target=_main, args=(rank, world, world // nodes, port, script, arguments, folder), daemon=True
        )
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(GUARD_S)
        process.kill()
    printed = [(folder / f"{rank}.out").read_text(encoding="utf-8") for rank in range(world)]
    assert [process.exitcode for process in ranks] == [0] * world, "\n".join(printed)
    assert not any(printed[1:]), "rank 0 speaks for all"
    return printed[0]


def _main(
    rank: int, world: int, local: int, port: int, script: str, arguments: tuple[str, ...], folder: Path
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_RANK=str(rank % local), LOCAL_WORLD_SIZE=str(local))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    with (folder / f"{rank}.out").open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.argv = [script, *arguments]
    runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]


def test_a_training_loop_learns_and_reports(tmp_path: Path) -> None:
    printed = torchrun(2, "ddp.py", folder=tmp_path)
    assert len(losses(printed)) == 4
    assert losses(printed)[-1] < losses(printed)[0]
    assert "2 ranks\n  why          " in printed


@pytest.mark.rest
def test_a_run_resumes_bit_for_bit_and_on_another_number_of_ranks(tmp_path: Path) -> None:
    def run(world: int, checkpoint: str, until: int) -> str:
        folder = str(tmp_path / checkpoint)
        return torchrun(world, "resume.py", folder, "--until", str(until), folder=tmp_path)

    straight = run(2, "straight", 40)
    run(2, "broken", 20)
    resumed = run(2, "broken", 40)
    assert straight.startswith("2 ranks, steps 0 to 40: ")
    assert resumed.startswith("2 ranks, steps 20 to 40: ")
    assert re.search("parameters [0-9a-f]{8,}", straight)
    assert straight.split(": ")[1] == resumed.split(": ")[1]
    assert run(3, "broken", 50).startswith("3 ranks, steps 40 to 50: ")


@pytest.mark.rest
def test_autocast_a_scaler_and_clipping_go_together(tmp_path: Path) -> None:
    printed = torchrun(2, "mixed_precision.py", folder=tmp_path)
    assert losses(printed)[-1] < losses(printed)[0]
    assert "skipped" not in printed
    assert "scale 1024\n" in printed


@pytest.mark.rest
def test_what_is_written_for_gpus_runs_without_them(tmp_path: Path) -> None:
    printed = torchrun(2, "gpu.py", folder=tmp_path)
    assert losses(printed)[-1] < losses(printed)[0]
    assert "gradwire: int8" in printed


@pytest.mark.rest
def test_ranks_of_two_nodes_add_up_inside_first(tmp_path: Path) -> None:
    printed = torchrun(4, "two_nodes.py", folder=tmp_path, nodes=2)
    assert losses(printed)[-1] < losses(printed)[0]
    assert "4 ranks on 2 nodes" in " ".join(printed.split())


@pytest.mark.rest
def test_two_sites_learn_between_rounds(tmp_path: Path) -> None:
    for nodes in (2, 1):  # one machine counts as two sites
        printed = torchrun(4, "two_sites.py", folder=tmp_path, nodes=nodes)
        assert losses(printed)[-1] < losses(printed)[0]
        # Half of 38,410 parameters in float32 for each of two ranks of a site, and a few rows.
        [sent] = re.findall(r"2 sites, 3 rounds, (\d+) kB", printed)
        assert 76 <= int(sent) <= 78


def test_an_example_says_which_package_is_missing(tmp_path: Path) -> None:
    (tmp_path / "torchft.py").write_text("raise ImportError")
    command = [sys.executable, str(ROOT / "examples" / "come_and_go.py")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("come_and_go.py needs torchft")
    assert "Traceback" not in done.stderr


@pytest.mark.rest
@pytest.mark.timeout(600)
def test_three_sites_meet_in_a_folder() -> None:
    pytest.importorskip("obstore")
    command = [sys.executable, str(ROOT / "examples" / "three_sites.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"round 6 of site-\w, site-\w", done.stdout)) == 3


@pytest.mark.rest
def test_accumulation_sends_once_per_optimizer_step(tmp_path: Path) -> None:
    printed = torchrun(2, "accumulation.py", folder=tmp_path)
    assert losses(printed)[-1] < losses(printed)[0]
    assert "Wire(int8, step 20, 27 % of dense)" in printed
    assert "Warning" not in printed


@pytest.mark.rest
def test_a_policy_gives_parameters_recipes_of_their_own(tmp_path: Path) -> None:
    printed = torchrun(2, "policy.py", folder=tmp_path)
    assert losses(printed)[-1] < losses(printed)[0]
    assert "gradwire: leader_topk(ratio=0.05" in printed
    # By the recipe alone a tenth or less would travel; the embedding, two thirds of it all, takes a quarter.
    assert 10.0 < float(re.findall(r"([\d.]+)% of plain all-reduce", printed)[0]) < 30.0


@pytest.mark.rest
def test_a_plain_module_learns_in_a_loop_of_its_own(tmp_path: Path) -> None:
    printed = torchrun(2, "plain_loop.py", folder=tmp_path)
    assert losses(printed)[-1] < losses(printed)[0]
    assert printed.count("gradwire: int8") == 1


@pytest.mark.rest
def test_a_model_that_is_sharded_inside_nodes_learns(tmp_path: Path) -> None:
    printed = torchrun(4, "hsdp.py", folder=tmp_path)
    assert losses(printed)[-1] < 0.7 * losses(printed)[0]
    assert printed.count("gradwire: int8") == 1


@pytest.mark.rest
def test_a_sharded_model_learns_with_gathers_and_scatters_in_few_bits(tmp_path: Path) -> None:
    printed = torchrun(2, "fsdp2.py", folder=tmp_path)
    assert losses(printed)[-1] < 0.7 * losses(printed)[0]
    assert printed.count("gradwire: int4") == 1
    assert "gathered as  int8" in printed


@pytest.mark.rest
def test_a_sharded_model_learns_with_exact_gathers(tmp_path: Path) -> None:
    printed = torchrun(2, "fsdp2.py", "--exact", folder=tmp_path)
    assert losses(printed)[-1] < 0.7 * losses(printed)[0]
    assert "exact: changes" in printed


def test_every_example_is_run() -> None:
    assert EXAMPLES == [
        "accumulation.py",
        "come_and_go.py",  # needs torchft: tests/integrations/test_torchft.py runs it
        "ddp.py",
        "elastic.py",
        "fsdp2.py",
        "gpu.py",
        "hsdp.py",
        "mixed_precision.py",
        "plain_loop.py",
        "policy.py",
        "resume.py",
        "three_sites.py",
        "two_nodes.py",
        "two_sites.py",
    ]
