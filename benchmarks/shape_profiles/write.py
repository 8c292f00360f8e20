"""Writes the shape profiles that `emulated(model)` reads: `python benchmarks/shape_profiles/write.py`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import sequence
import vision

PROFILES = Path(__file__).parents[2] / "src/gradwire/lab/workloads/profiles"
MODELS = {
    "alexnet": vision.alexnet,
    "bert_base": sequence.bert_base,
    "bilstm4": sequence.bilstm4,
    "gpt2": sequence.gpt2,
    "mask_rcnn": vision.mask_rcnn,
    "mobilenet_v2": vision.mobilenet_v2,
    **{f"resnet{depth}": partial(vision.resnet, depth) for depth in (18, 34, 50, 101)},
    "transformer_base": sequence.transformer_base,
    "vgg19": vision.vgg19,
    "vit_b16": vision.vit_b16,
}


def main() -> None:
    for model, build in MODELS.items():
        net = build()
        (PROFILES / f"{model}.json").write_text(net.to_json(model))
        macs = sum(layer[1] for layer in net.layers)
        print(f"{model:18} {net.parameters:>12,} parameters, {macs / 1e9:7.2f} G multiply-adds per sample")


if __name__ == "__main__":
    main()
