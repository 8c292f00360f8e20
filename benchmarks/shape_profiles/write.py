"""Writes the shape profiles of published networks: `python benchmarks/shape_profiles/write.py`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import sequence
import unet
import vision

PROFILES = Path(__file__).parents[2] / "src/gradwire/planning/profiles"
# COVAP's Table VI has 81,894,144 parameters and Chinese texts, and no layers. 10 layers, 13317 words and 1024
# positions make that number, and are the small configuration of a public Chinese GPT-2 of its learning rate.
COVAP = "GPT-2 with 10 layers and 13317 words (inferred from COVAP, Table VI), output tied to the embedding"
RADFORD = "GPT-2 {} (Radford et al. 2019), output tied to the embedding, 1024 positions"
MODELS = {
    "alexnet": vision.alexnet,
    "bert_base": partial(sequence.bert, "base", 768, 12),
    "bert_large": partial(sequence.bert, "large", 1024, 24),
    "bilstm4": sequence.bilstm4,
    "gpt2": partial(sequence.gpt2, RADFORD.format("small"), 768, 12),
    "gpt2_covap": partial(sequence.gpt2, COVAP, 768, 10, words=13317),
    "gpt2_medium": partial(sequence.gpt2, RADFORD.format("medium"), 1024, 24),
    "gpt2_xl": partial(sequence.gpt2, RADFORD.format("XL"), 1600, 48),
    "llama_3_8b": sequence.llama_3_8b,
    "llama_7b": sequence.llama_7b,
    "mask_rcnn": vision.mask_rcnn,
    "mobilenet_v2": vision.mobilenet_v2,
    "qwen2_5_7b": sequence.qwen2_5_7b,
    **{f"resnet{depth}": partial(vision.resnet, depth) for depth in (18, 34, 50, 101)},
    "sdxl_unet": unet.sdxl_unet,
    "transformer_base": sequence.transformer_base,
    **{f"vgg{depth}": partial(vision.vgg, depth) for depth in (16, 19)},
    "vit_b16": partial(vision.vit, "B", 768, 12),
    "vit_l16": partial(vision.vit, "L", 1024, 24),
}


def main() -> None:
    for model, build in MODELS.items():
        net = build()
        (PROFILES / f"{model}.json").write_text(net.to_json(model))
        macs = sum(layer[1] for layer in net.layers)
        print(f"{model:18} {net.parameters:>12,} parameters, {macs / 1e9:7.2f} G multiply-adds per sample")


if __name__ == "__main__":
    main()
