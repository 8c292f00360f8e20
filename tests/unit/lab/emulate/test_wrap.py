"""Which commands can be slowed without namespaces, and how they are rewritten."""

import sys

import pytest

from gradwire_lab.emulate.ranks import through_shim
from gradwire_lab.emulate.shim import resolve

SHIM = ["-m", "gradwire_lab.emulate.shim"]


@pytest.mark.parametrize(
    ("options", "program"),
    [
        ([], ["train.py", "--lr", "0.1"]),
        (["-u", "-X", "dev"], ["train.py"]),
        (["-W", "error"], ["-m", "package.train", "-m"]),
        (["-O"], ["-c", "print(1)"]),
    ],
)
def test_the_shim_goes_between_options_and_program(options, program):
    for python in (sys.executable, "python", "/usr/bin/python3.12"):
        assert through_shim([python, *options, *program]) == [python, *options, *SHIM, *program]


def test_a_wrapped_command_stays_as_it_is():
    wrapped = through_shim(["python", "train.py"])
    assert through_shim(wrapped) == wrapped


@pytest.mark.parametrize(
    "argv", [["torchrun", "train.py"], ["sh", "-c", "python x.py"], ["./train"], ["pythonista"]]
)
def test_other_programs_are_refused_by_name(argv):
    with pytest.raises(ValueError, match="only Python programs"):
        through_shim(argv)


@pytest.mark.parametrize("argv", [[], ["python"], ["python", "-u"]])
def test_a_command_without_a_program_is_refused(argv):
    with pytest.raises(ValueError, match="command"):
        through_shim(argv)


@pytest.mark.parametrize(
    ("asked", "taken"),
    [
        ("gloo", "gradwire_delayed"),
        ("GLOO", "gradwire_delayed"),
        ("cpu:gloo,cuda:nccl", "cpu:gradwire_delayed,cuda:nccl"),
        ("nccl", "nccl"),
        (None, None),
    ],
)
def test_gloo_is_replaced_wherever_it_is_asked_for(asked, taken):
    assert resolve(asked) == taken
