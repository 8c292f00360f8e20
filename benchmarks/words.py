"""(shared) A small transformer with an embedding of words, which says from which part of a text a window is.

As BERT on SST (GComp, section 7): words in, one of some classes out, so that rows of words which a batch
does not contain have zero gradients. The text is the vendored one, its words are the most frequent ones, and
all others are one word more. A batch of 12 windows has 768 words, about as many as 32 sentences of SST.
"""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradwire_lab.data import load_text
from gradwire_lab.workloads.base import Batch, Parameters, generator, seeded
from gradwire_lab.workloads.models import TransformerLayer

WORDS, CLASSES, WIDTH, DEPTH, HEADS, LENGTH = 4096, 8, 256, 3, 4, 64


class Classifier(nn.Module):
    """(n, LENGTH) words -> (n, CLASSES) logits, from the mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(*(TransformerLayer(WIDTH, HEADS) for _ in range(DEPTH)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, codes: Tensor) -> Tensor:
        """See the class."""
        at = torch.arange(codes.shape[1])
        logits: Tensor = self.head(self.layers(self.words(codes) + self.positions(at)).mean(1))
        return logits


class Words:
    """The workload: AdamW, 12 windows of 64 words a rank and step."""

    name = "words"
    batch_size = 12

    def __init__(self) -> None:
        text = load_text(None, full=False)
        words = "".join(text.vocabulary[code] for code in text.train.tolist()).lower().split()
        codes = {word: code for code, (word, _) in enumerate(Counter(words).most_common(WORDS - 1))}
        self._codes = torch.tensor([codes.get(word, WORDS - 1) for word in words])

    def model(self, seed: int) -> nn.Module:
        """As random as torch makes it."""
        with seeded(seed):
            return Classifier()

    def optimizer(self, params: Parameters) -> torch.optim.Optimizer:
        """At a rate for training from nothing."""
        return torch.optim.AdamW(params, 1e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def batches(self, rank: int, world: int, seed: int) -> Iterator[Batch]:
        """Windows of the whole text at random, and the parts of the text that they are from."""
        stream, last = generator(seed, rank), len(self._codes) - LENGTH
        while True:
            starts = torch.randint(last, (self.batch_size,), generator=stream)
            yield self._codes[starts.unsqueeze(1) + torch.arange(LENGTH)], starts * CLASSES // last

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross entropy."""
        codes, parts = batch
        return functional.cross_entropy(model(codes), parts)
