"""Convolutional networks and the vision transformer, at 224x224 pixels unless stated."""

from __future__ import annotations

from sketch import Sketch


def vgg(depth: int) -> Sketch:
    letter, deep = {16: ("D", 3), 19: ("E", 4)}[depth]
    net = Sketch(f"VGG-{depth} (Simonyan, Zisserman 2014, configuration {letter}), 224x224 pixels")
    inputs, side = 3, 224
    for stage, (width, count) in enumerate(((64, 2), (128, 2), (256, deep), (512, deep), (512, deep))):
        for layer in range(count):
            net.conv(f"stage{stage}.conv{layer}", inputs, width, 3, side * side, bias=True)
            inputs = width
        side //= 2
    for name, wide, narrow in (("fc1", 512 * 7 * 7, 4096), ("fc2", 4096, 4096), ("fc3", 4096, 1000)):
        net.linear(name, wide, narrow)
    return net


def alexnet() -> Sketch:
    net = Sketch("AlexNet in one column (Krizhevsky 2014, arXiv:1404.5997), 224x224 pixels")
    for index, (inputs, outputs, kernel, side) in enumerate(
        ((3, 64, 11, 55), (64, 192, 5, 27), (192, 384, 3, 13), (384, 256, 3, 13), (256, 256, 3, 13))
    ):
        net.conv(f"conv{index}", inputs, outputs, kernel, side * side, bias=True)
    for name, wide, narrow in (("fc1", 256 * 6 * 6, 4096), ("fc2", 4096, 4096), ("fc3", 4096, 1000)):
        net.linear(name, wide, narrow)
    return net


def resnet(depth: int) -> Sketch:
    net = Sketch(f"ResNet-{depth} (He, Zhang, Ren, Sun 2015), stride in the 3x3 convolution, 224x224 pixels")
    resnet_body(net, depth, 112 * 112, norms=True)
    net.linear("fc", 512 * (1 if depth < 50 else 4), 1000)
    return net


def resnet_body(net: Sketch, depth: int, stem_pixels: int, *, norms: bool) -> None:
    """Stem and four stages; `stem_pixels` places after the stem, a quarter of them in the first stage."""
    counts = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}[depth]
    _conv_norm(net, "stem", 3, 64, 7, stem_pixels, norms)
    inputs, pixels = 64, stem_pixels // 4
    for stage, count in enumerate(counts):
        width = 64 * 2**stage
        for block in range(count):
            name = f"stage{stage}.block{block}"
            halves = stage > 0 and block == 0
            after = pixels // 4 if halves else pixels
            if depth < 50:
                steps, outputs = ((inputs, width, 3, after), (width, width, 3, after)), width
            else:
                outputs = 4 * width
                steps = ((inputs, width, 1, pixels), (width, width, 3, after), (width, outputs, 1, after))
            for index, (wide, narrow, kernel, places) in enumerate(steps):
                _conv_norm(net, f"{name}.conv{index}", wide, narrow, kernel, places, norms)
            if inputs != outputs:
                _conv_norm(net, f"{name}.shortcut", inputs, outputs, 1, after, norms)
            inputs, pixels = outputs, after


def mobilenet_v2() -> Sketch:
    net = Sketch("MobileNetV2 (Sandler et al. 2018, table 2), 224x224 pixels")
    _conv_norm(net, "stem", 3, 32, 3, 112 * 112, True)
    inputs, side = 32, 112
    settings = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )
    for stage, (expand, outputs, count, stride) in enumerate(settings):
        for block in range(count):
            name, hidden = f"stage{stage}.block{block}", inputs * expand
            if expand != 1:
                _conv_norm(net, f"{name}.expand", inputs, hidden, 1, side * side, True)
            side //= stride if block == 0 else 1
            net.conv(f"{name}.depthwise", hidden, hidden, 3, side * side, groups=hidden)
            net.norm(f"{name}.depthwise.norm", hidden)
            _conv_norm(net, f"{name}.project", hidden, outputs, 1, side * side, True)
            inputs = outputs
    _conv_norm(net, "last", inputs, 1280, 1, 49, True)
    net.linear("fc", 1280, 1000)
    return net


def vit(letter: str, width: int, layers: int) -> Sketch:
    net = Sketch(f"ViT-{letter}/16 (Dosovitskiy et al. 2020), 224x224 pixels")
    places = 197
    net.add("class_token", 0, (1, 1, width))
    net.conv("patches", 3, width, 16, 196, bias=True)
    net.add("positions", 0, (1, places, width))
    for layer in range(layers):
        name = f"layer{layer}"
        net.norm(f"{name}.norm1", width)
        net.linear(f"{name}.query_key_value", width, 3 * width, places, extra=2 * places * places * width)
        net.linear(f"{name}.attended", width, width, places)
        net.norm(f"{name}.norm2", width)
        net.linear(f"{name}.widen", width, 4 * width, places)
        net.linear(f"{name}.narrow", 4 * width, width, places)
    net.norm("norm", width)
    net.linear("head", width, 1000)
    return net


def mask_rcnn() -> Sketch:
    net = Sketch(
        "Mask R-CNN (He et al. 2017) with ResNet-50-FPN, frozen normalisation, 91 classes; "
        "800x1216 pixels, 512 boxes, 128 masks"
    )
    stem = 400 * 608
    resnet_body(net, 50, stem, norms=False)
    levels = [stem // 4 ** (level + 1) for level in range(4)]
    for level, pixels in enumerate(levels):
        net.conv(f"pyramid.lateral{level}", 256 * 2**level, 256, 1, pixels, bias=True)
    for level, pixels in enumerate(levels):
        net.conv(f"pyramid.output{level}", 256, 256, 3, pixels, bias=True)
    for name, outputs, kernel in (("conv", 256, 3), ("objectness", 3, 1), ("deltas", 12, 1)):
        net.conv(f"proposals.{name}", 256, outputs, kernel, sum(levels), bias=True)
    for name, inputs, outputs in (
        ("fc1", 256 * 49, 1024),
        ("fc2", 1024, 1024),
        ("classes", 1024, 91),
        ("deltas", 1024, 364),
    ):
        net.linear(f"boxes.{name}", inputs, outputs, 512)
    for layer in range(4):
        net.conv(f"masks.conv{layer}", 256, 256, 3, 128 * 14 * 14, bias=True)
    net.conv("masks.upsample", 256, 256, 2, 128 * 14 * 14, bias=True)
    net.conv("masks.classes", 256, 91, 1, 128 * 28 * 28, bias=True)
    return net


def _conv_norm(
    net: Sketch, name: str, inputs: int, outputs: int, kernel: int, pixels: int, norms: bool
) -> None:
    net.conv(name, inputs, outputs, kernel, pixels)
    if norms:
        net.norm(f"{name}.norm", outputs)
