"""Commands are imported when they are called."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from gradwire.cli import doctor as command
from gradwire.cli import start as entry
from gradwire.cli.main import COMMANDS, app
from gradwire.version import described
from gradwire_lab.cli.choices import Mode
from gradwire_lab.emulate import MODES
from gradwire_lab.emulate.network import RunOutcome


def test_help_names_every_command_and_no_other_is_known() -> None:
    found = CliRunner().invoke(app, ["--help"]).output
    assert all(f" {name} " in found for name in COMMANDS)
    refused = CliRunner().invoke(app, ["bnech"])
    assert refused.exit_code == 2


def test_what_runs_others_starts_without_torch() -> None:
    modules = "gradwire.cli.main, gradwire_lab.cli.net, gradwire_lab.cli.bench, gradwire_lab.cli.demo"
    code = f"import {modules}, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_and_completion_load_no_torch() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from gradwire.cli.main import COMMANDS, app\n"
        "for words in ([], *([name] for name in COMMANDS)):\n"
        "    assert CliRunner().invoke(app, [*words, '-h']).exit_code == 0, words\n"
        "def completed(words):\n"
        "    env = {'_GRADWIRE_COMPLETE': 'complete_bash', 'COMP_WORDS': words}\n"
        "    env['COMP_CWORD'] = str(words.count(' '))\n"
        "    return CliRunner().invoke(app, [], env=env, prog_name='gradwire').output.split()\n"
        "assert completed('gradwire pl') == ['plan']\n"
        "assert completed('gradwire recipes leader') == ['leader_topk']\n"
        "assert completed('gradwire plan --model resnet5') == ['resnet50']\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.rest
def test_all_that_is_public_is_there_on_first_use() -> None:
    code = (
        "import gradwire\n"
        "assert 'attach' not in vars(gradwire) and 'attach' in dir(gradwire)\n"
        "assert all(getattr(gradwire, name) is not None for name in gradwire.__all__)\n"
        "assert gradwire.recipes.names() and gradwire.recipe('dense')\n"
        "assert gradwire.measure.layer_rates and gradwire.errors.PeerFailed\n"
        "assert not hasattr(gradwire, 'attac')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_version_is_printed() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"gradwire {described()}\n"


@pytest.mark.parametrize("words", [["-h"], ["net", "-h"], ["net", "run", "-h"], ["warmup", "-h"]])
def test_help_has_a_short_name_everywhere(words: list[str]) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0
    assert "Usage:" in done.output


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS), ["net", "run"]], ids="_".join)
def test_help_is_whole_at_60_columns(words: list[str]) -> None:
    done = CliRunner().invoke(app, [*words, "-h"], terminal_width=60)
    assert done.exit_code == 0
    assert max(len(line) for line in done.output.splitlines()) <= 60
    command: Any = typer.main.get_command(app)
    for word in words:
        command = command.commands[word]
    helps = {option.name: option.help or "" for option in command.params if hasattr(option, "help")}
    helps |= {name: each.help.partition("\n\n")[0] for name, each in getattr(command, "commands", {}).items()}
    said = "".join(done.output.split())
    assert [name for name, text in helps.items() if "".join(text.split()) not in said] == []


def test_a_document_that_is_not_there_is_named(tmp_path: Path) -> None:
    refused = CliRunner().invoke(app, ["report", str(tmp_path / "bench.json")], terminal_width=200)
    assert refused.exit_code == 2
    assert f"{tmp_path / 'bench.json'}: No such file or directory" in refused.output


def test_an_interrupt_before_the_command_line_is_there_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(**_options: object) -> None:
        raise KeyboardInterrupt

    loading: Any = ModuleType("gradwire.cli.main")
    loading.app = interrupted
    monkeypatch.setitem(sys.modules, "gradwire.cli.main", loading)
    with pytest.raises(SystemExit) as ended:
        entry.start()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "gradwire: interrupted\n"


def test_before_the_command_line_only_the_standard_library_is_loaded() -> None:
    code = "import gradwire.cli.start, sys; assert not {'typer', 'rich', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_misspelt_name_is_answered_without_torch() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from gradwire.cli.main import app\n"
        "for words, near in (\n"
        "    (['bench', '--recipes', 'dense;topq(ratio=0.1)'], \"did you mean 'topk'\"),\n"
        "    (['demo', '--recipe', 'topq'], \"did you mean 'topk'\"),\n"
        "    (['bench', '--workload', 'resnet_19'], \"did you mean 'resnet18'\"),\n"
        "    (['bench', '--workload', 'emulated(gpt3)'], \"did you mean 'gpt2\"),\n"
        "):\n"
        "    done = CliRunner().invoke(app, words)\n"
        "    said = ' '.join(done.output.replace('│', ' ').split())\n"
        "    assert done.exit_code == 2 and near in said, said\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "gpt2"], "--workload 'emulated(gpt2)'"),
        (["--model", "m:make", "--workload", "convnet"], "either --workload or --model"),
    ],
)
def test_a_model_of_your_own_is_named_by_where_it_is_made(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["bench", *words])
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())


def test_modes_to_choose_from_are_those_that_there_are() -> None:
    assert [mode.value for mode in Mode] == ["auto", *MODES]
    refused = CliRunner().invoke(app, ["net", "run", "--mode", "rot", "--", "true"])
    assert refused.exit_code == 2


def test_the_doctor_says_what_is_there() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json", "-"])
    assert done.exit_code == 0
    found = json.loads(done.output)
    assert found["format"] == 1
    assert found["lacking"] == []
    facts = found["facts"]
    assert facts["gradwire"] == described()
    assert facts["torch"].startswith("2.")
    assert facts["gloo"].startswith("available")
    assert {"CUDA", "triton", "kernel cache", "network, backend"} <= facts.keys()


def test_what_is_lacking_is_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "lacking: torch was built without gloo" in done.output
    assert command.findings()["facts"]["gloo"] == "not available"


def test_the_doctor_says_where_a_gpu_encodes_and_over_what_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _number: "a GPU")
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    facts = command.findings()["facts"]
    assert facts["CUDA"] == "a GPU"
    assert facts["placement"].startswith("device; host for recipes that read numbers there")
    assert facts["nccl"] == "available, for tensors on GPUs"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("", "127.0.0.1, as the host name nobody.invalid has no address of this machine"),
        ("lo", "127.0.0.1, by GLOO_SOCKET_IFNAME=lo"),
        ("no-such-card", "none"),
    ],
)
def test_the_doctor_says_at_which_address_gloo_listens(
    asked: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", asked)
    monkeypatch.setattr("socket.gethostname", lambda: "nobody.invalid")
    found = command.findings()
    assert found["facts"]["interface lo"].startswith("127.0.0.1, ")
    assert found["facts"]["gloo's address"].startswith(said)
    missing = ["GLOO_SOCKET_IFNAME=no-such-card: no address is there"]
    assert found["lacking"] == (missing if said == "none" else [])


def test_a_lighthouse_without_torchft_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)
    done = CliRunner().invoke(app, ["lighthouse"])
    assert done.exit_code == 2
    assert "pip install '.[elastic]' in a copy" in done.output


@pytest.mark.parametrize(
    ("bind", "said"),
    [("10.0.0.1:29510", "http://10.0.0.1:29510,"), ("0.0.0.0:29510", "http://head:29510,")],
)
def test_a_lighthouse_says_the_address_that_members_pass(
    bind: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = SimpleNamespace(address=lambda: "http://head:29510", shutdown=lambda: None)
    torchft = SimpleNamespace(LighthouseServer=lambda **_options: server)
    monkeypatch.setitem(sys.modules, "torchft", SimpleNamespace(coordination=torchft))
    monkeypatch.setitem(sys.modules, "torchft.coordination", torchft)
    event = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr("gradwire.cli.lighthouse.threading", SimpleNamespace(Event=lambda: event))
    done = CliRunner().invoke(app, ["lighthouse", "--bind", bind])
    assert done.exit_code == 0, done.output
    assert said in done.output


@pytest.mark.parametrize(("failed_rank", "code"), [(None, 0), (1, 3)])
def test_a_run_on_a_network_ends_with_the_code_of_the_rank_that_failed_first(
    failed_rank: int | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may have ended well, and the last one is ended because of the failure."""
    codes = (0, 0, 0) if failed_rank is None else (0, 3, 143)
    monkeypatch.setattr("gradwire_lab.cli.net.run_on_all", lambda *_: RunOutcome(codes, failed_rank, 1.0))
    words = ["net", "run", "--mode", "backend", "--workers", "3", "--", "true"]
    assert CliRunner().invoke(app, words).exit_code == code


def test_a_command_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        subprocess.run(["nosuchcommand"], check=True)

    monkeypatch.setattr("gradwire_lab.cli.net.run_on_all", start)
    done = CliRunner().invoke(app, ["net", "run", "--mode", "backend", "--", "nosuchcommand"])
    assert done.exit_code == 127
    assert "command not found: nosuchcommand" in done.output
