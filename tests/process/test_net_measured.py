"""What workers measure on an emulated network: rates, delays and bytes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire_lab import emulate

pytestmark = [pytest.mark.network, pytest.mark.process, pytest.mark.rest, pytest.mark.timeout(300)]
SCENE = Path(__file__).with_name("net_scene.py")
# Root's and a user's namespaces differ in who may make them, not in what they are: measured once.
NAMESPACES = next((mode for mode in ("root", "user") if emulate.why_not(mode) is None), None)
PAYLOAD_BYTES = 4_000_000  # two ranks: 2(N-1)/N times this crosses every interface, which is the same number


@pytest.fixture(scope="module", params=["namespaces", "backend"])
def found(request):
    mode = NAMESPACES if request.param == "namespaces" else "backend"
    if mode is None:
        pytest.skip(f"no network namespaces: {emulate.why_not('root')}; {emulate.why_not('user')}")
    done = subprocess.run(
        [sys.executable, str(SCENE), mode], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_link_is_as_fast_as_it_was_ordered(found):
    bit_per_s = PAYLOAD_BYTES * 8 / found["slow"]["seconds_s"]
    # Below by headers, by a busy machine; above only by what tbf may send at once, which is under 1 % here.
    assert 0.5 * 100e6 < bit_per_s < 1.03 * 100e6


def test_reshaping_reaches_processes_that_run(found):
    # Four times the rate; half of the gain is left to the noise of a busy machine.
    assert found["slow"]["seconds_s"] / found["fast"]["seconds_s"] > 2


def test_the_delay_is_paid_once_per_hop(found):
    # A ring of two makes two hops. Above: ten times, for a busy machine.
    assert 2 * 0.02 <= found["far"]["seconds_s"] < 10 * 2 * 0.02
    assert found["near"]["seconds_s"] < 0.02


def test_interface_counters_agree_with_the_formula(found):
    moved = found["slow"]["tx_bytes"]
    if found["mode"] == "backend":
        assert moved is None
        assert found["total_tx_bytes"] is None
    else:
        # 54 to 66 bytes of headers per 9000, and as many for acknowledgements: 1 to 2 %.
        assert 1 <= moved / PAYLOAD_BYTES < 1.03
        assert found["total_tx_bytes"] > 2 * moved


def test_a_servers_link_has_no_limit(found):
    assert found["mode"] == "backend" or found["limited"] == [True, True, False]


def test_all_workers_ended_well(found):
    assert found["codes"] == [0, 0]
