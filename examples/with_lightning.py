"""Lightning's Trainer, with checkpoints that a killed run goes on from bit for bit.

    python examples/with_lightning.py checkpoints
    torchrun --nproc-per-node 2 examples/with_lightning.py checkpoints

Start it again after a kill: it takes up the last checkpoint in the folder.
"""

import os
import sys

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradwire.integrations.lightning import GradwireCallback

EPOCHS, BATCHES = 4, 4


class Classifier(LightningModule):
    """Which of ten fixed directions is a point closest to?"""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """The loss of a batch."""
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(folder: str) -> None:
    """Train, save after every epoch, print what gradwire did."""
    torch.set_num_threads(1)  # ranks share this machine
    seed_everything(0)
    inputs = torch.randn(2 * BATCHES * 32, 64)
    labels = (inputs @ torch.randn(64, 10)).argmax(dim=1)
    gradwire = GradwireCallback("topk(0.05)")
    trainer = Trainer(
        accelerator="cpu", strategy="ddp", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 2)),
        max_epochs=EPOCHS, callbacks=[gradwire, ModelCheckpoint(folder, save_last=True)],
        logger=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Classifier(), DataLoader(TensorDataset(inputs, labels), batch_size=32), ckpt_path="last")
    if trainer.is_global_zero:
        print(gradwire.wire.report())


if __name__ == "__main__":
    main(sys.argv[1])
