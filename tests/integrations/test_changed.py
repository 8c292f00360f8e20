"""The examples as people change them: short types, other accumulation, evaluation between, an early end.

The changes are those that each framework's own documents suggest.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.ranks import GUARD_S, Changes, run

STEPS, ENDS_AT = 16, 8

pytestmark = [pytest.mark.process, pytest.mark.timeout(4 * GUARD_S)]

ACCELERATE, FABRIC = "with_accelerate.py", "with_fabric.py"
LIGHTNING, TRAINER = "with_lightning.py", "with_trainer.py"

SAVED = "        if accelerator.sync_gradients and"
EVALUATES = f"""\
        model.eval()
        with torch.no_grad():
            model(examples)
        model.train()
{SAVED}"""

CLEARED = "        optimizer.zero_grad()\n"
ACCUMULATES = f"""\
{CLEARED}\
        with fabric.no_backward_sync(model):
            fabric.backward(model(inputs).square().mean())
"""

CONFIGURES = "    def configure_optimizers(self)"
VALIDATES = f"""\
    def validation_step(self, batch, _):
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)

{CONFIGURES}"""
LOADER = "DataLoader(TensorDataset(inputs, labels), batch_size=32)"

HELD_OUT = "train_dataset=TensorDataset(counting)"
EVERY_THREE = "logging_steps=SAVE_EVERY, eval_strategy='steps', eval_steps=3"

CHANGED: dict[str, tuple[str, Changes]] = {
    "Accelerate in bfloat16": (ACCELERATE, [("cpu=True,", "cpu=True, mixed_precision='bf16',")]),
    "Accelerate, four batches a step": (ACCELERATE, [("SAVE_EVERY = 16, 2,", "SAVE_EVERY = 16, 4,")]),
    "Accelerate, evaluation between": (ACCELERATE, [(SAVED, EVALUATES)]),
    "Fabric in bfloat16": (FABRIC, [('strategy="ddp",', 'strategy="ddp", precision="bf16-mixed",')]),
    "Fabric, two batches a step": (FABRIC, [(CLEARED, ACCUMULATES)]),
    "Lightning in bfloat16": (LIGHTNING, [('strategy="ddp",', 'strategy="ddp", precision="bf16-mixed",')]),
    "Lightning, two batches a step": (
        LIGHTNING,
        [
            ("logger=False,", "logger=False, accumulate_grad_batches=2,"),
            ("EPOCHS, BATCHES = 4, 4", "EPOCHS, BATCHES = 4, 8"),
        ],
    ),
    "Lightning, validation between": (
        LIGHTNING,
        [(CONFIGURES, VALIDATES), (f"{LOADER}, ckpt_path", f"{LOADER}, {LOADER}, ckpt_path")],
    ),
    "Trainer in bfloat16": (TRAINER, [("use_cpu=True,", "use_cpu=True, bf16=True,")]),
    "Trainer, four batches a step": (TRAINER, [("accumulation_steps=2", "accumulation_steps=4")]),
    "Trainer, evaluation between": (
        TRAINER,
        [
            ("logging_steps=SAVE_EVERY", EVERY_THREE),
            (HELD_OUT, f"{HELD_OUT}, eval_dataset=TensorDataset(counting[:32])"),
        ],
    ),
}


@pytest.mark.parametrize("change", CHANGED)
def test_gradwire_carries_every_step_and_ranks_end_with_one_model(change: str, tmp_path: Path) -> None:
    example, changes = CHANGED[change]
    done = run(example, tmp_path / "checkpoints", tmp_path / "1", changes=changes)
    assert done.codes == [0, 0], done.printed
    assert done.carried == 2 * [list(range(1, STEPS + 1))]
    assert len(set(done.parameters)) == 1
    assert "gradwire: topk(ratio=0.05" in done.printed


SAVES = "            accelerator.save_state(str(folder / str(at)))\n"
KEEPS = '            fabric.save(folder / f"{step:04}.ckpt", {**state, "step": step})\n'
BREAKS = "            if {} == {}:\n                break\n"
MAIN = "def main(folder: str)"
STOPS = f"""\
class Stops(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step >= {ENDS_AT}


{MAIN}"""
ADDED = "    trainer.add_callback(callback)\n"

ENDS: dict[str, Changes] = {
    ACCELERATE: [(SAVES, SAVES + BREAKS.format("at", ENDS_AT))],
    FABRIC: [(KEEPS, KEEPS + BREAKS.format("step", ENDS_AT))],
    LIGHTNING: [("max_epochs=EPOCHS", "max_epochs=EPOCHS // 2")],
    TRAINER: [
        (MAIN, STOPS),
        ("Trainer, TrainingArguments", "Trainer, TrainerCallback, TrainingArguments"),
        (ADDED, ADDED + "    trainer.add_callback(Stops())\n"),
    ],
}


@pytest.mark.parametrize("example", ENDS)
def test_a_run_that_ends_early_goes_on_later_as_if_it_had_not(example: str, tmp_path: Path) -> None:
    straight = run(example, tmp_path / "straight", tmp_path / "1")
    short = run(example, tmp_path / "short", tmp_path / "2", changes=ENDS[example])
    assert short.codes == [0, 0], short.printed
    assert short.carried == 2 * [list(range(1, ENDS_AT + 1))]
    later = run(example, tmp_path / "short", tmp_path / "3")
    assert later.codes == [0, 0], later.printed
    assert later.carried == 2 * [list(range(ENDS_AT + 1, STEPS + 1))]
    assert len({*straight.parameters, *later.parameters}) == 1


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("example", [ACCELERATE, FABRIC, LIGHTNING, TRAINER])
def test_one_process_and_three_train_as_two_do(example: str, world: int, tmp_path: Path) -> None:
    done = run(example, tmp_path / "checkpoints", tmp_path / "1", world=world)
    assert done.codes == world * [0], done.printed
    first, *others = done.carried
    assert len(first) >= STEPS // 2
    # Alone there is no wrapper, and each batch is exchanged. Before an optimizer has stepped, each counts.
    begin = 2 if world == 1 and example in (ACCELERATE, TRAINER) else 1
    assert first == list(range(begin, begin + len(first)))
    assert others == (world - 1) * [first]
    assert len(set(done.parameters)) == 1
    assert ("one rank: nothing to send" in done.printed) == (world == 1)
