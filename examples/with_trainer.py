"""Hugging Face Trainer, with checkpoints that a killed run goes on from bit for bit.

    torchrun --nproc-per-node 2 examples/with_trainer.py checkpoints

Start it again after a kill: it takes up the newest checkpoint in the folder. The model is a small GPT-2 that
starts from random numbers, so that nothing is downloaded.
"""

import os
import sys

import torch
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from gradwire.integrations.transformers import GradwireCallback

STEPS, SAVE_EVERY = 16, 4


def collate(rows: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch as GPT-2 takes it."""
    tokens = torch.stack([row for (row,) in rows])
    return {"input_ids": tokens, "labels": tokens}


def main(folder: str) -> None:
    """Train, save now and then, print what gradwire did."""
    torch.set_num_threads(1)  # ranks share this machine
    set_seed(0)
    counting = (torch.arange(16) + torch.randint(0, 64, (512, 1))) % 64
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=2))
    args = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=STEPS,
        save_steps=SAVE_EVERY,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=SAVE_EVERY,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model, args, data_collator=collate, train_dataset=TensorDataset(counting))
    callback = GradwireCallback(trainer, "topk(0.05)")
    trainer.add_callback(callback)
    os.makedirs(folder, exist_ok=True)  # or there is nothing to look for a checkpoint in
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))

    if trainer.is_world_process_zero():
        print(callback.wire.report())


if __name__ == "__main__":
    main(sys.argv[1])
