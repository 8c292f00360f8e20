"""Every rank has its cores, and the launcher keeps all of its own."""

import os
import subprocess
import sys

import pytest

from gradwire_lab.emulate.ranks import on_cores_of, share, sharing

ASK = "import os; print(*sorted(os.sched_getaffinity(0)))"


@pytest.mark.parametrize("cores", [[0], [0, 1], [2, 5, 7], list(range(16))])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_shares_are_disjoint_and_equal_where_there_are_enough(cores: list[int], workers: int) -> None:
    shares = [share(rank, workers, cores) for rank in range(workers)]
    if len(cores) < workers:
        assert shares == [set(cores)] * workers
    else:
        assert {len(each) for each in shares} == {len(cores) // workers}
        assert len(set.union(*shares)) == sum(map(len, shares))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not say who runs where")
def test_a_process_inherits_its_share_and_the_launcher_is_as_before() -> None:
    mine = os.sched_getaffinity(0)
    for rank in range(2):
        with on_cores_of(rank, 2):
            done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
        assert {int(core) for core in done.stdout.split()} == share(rank, 2, sorted(mine))
    assert os.sched_getaffinity(0) == mine


@pytest.mark.parametrize(("cores", "workers", "ranks"), [(1, 2, 2), (2, 2, 1), (8, 2, 1), (2, 4, 4)])
def test_whoever_has_cores_of_its_own_shares_them_with_nobody(
    cores: int, workers: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cores)), raising=False)
    assert sharing(workers) == ranks
