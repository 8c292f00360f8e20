"""The U-Net of a latent diffusion model with attention to text."""

from __future__ import annotations

from sketch import Sketch

TIME, TEXT, TOKENS = 1280, 2048, 77


def sdxl_unet() -> Sketch:
    net = Sketch("The U-Net of SDXL (Podell et al. 2023, table 1), 1024x1024 pixels, latents of 128x128")
    widths, depths, pixels = (320, 640, 1280), (0, 2, 10), 128 * 128
    net.conv("first", 4, widths[0], 3, pixels, bias=True)
    for name, inputs in (("time", widths[0]), ("sizes", 2816)):
        net.linear(f"{name}.in", inputs, TIME)
        net.linear(f"{name}.out", TIME, TIME)
    inputs, skips = widths[0], [widths[0]]
    for level, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        for block in range(2):
            _block(net, f"down{level}.block{block}", inputs, width, depth, pixels)
            inputs = width
            skips.append(width)
        if level < 2:
            pixels //= 4
            net.conv(f"down{level}.halved", width, width, 3, pixels, bias=True)
            skips.append(width)
    _block(net, "middle.block0", inputs, inputs, 10, pixels)
    _residual(net, "middle.block1", inputs, inputs, pixels)
    for level, (width, depth) in enumerate(zip(widths[::-1], depths[::-1], strict=True)):
        for block in range(3):
            _block(net, f"up{level}.block{block}", inputs + skips.pop(), width, depth, pixels)
            inputs = width
        if level < 2:
            pixels *= 4
            net.conv(f"up{level}.doubled", width, width, 3, pixels, bias=True)
    net.norm("norm", inputs)
    net.conv("last", inputs, 4, 3, pixels, bias=True)
    return net


def _block(net: Sketch, name: str, inputs: int, width: int, depth: int, pixels: int) -> None:
    """A residual block, and `depth` layers of a transformer if there are any."""
    _residual(net, name, inputs, width, pixels)
    if depth == 0:
        return
    net.norm(f"{name}.norm", width)
    net.linear(f"{name}.in", width, width, pixels)
    for layer in range(depth):
        _attention(net, f"{name}.layer{layer}.self", width, width, pixels, pixels)
        _attention(net, f"{name}.layer{layer}.text", width, TEXT, pixels, TOKENS)
        net.norm(f"{name}.layer{layer}.norm", width)
        net.linear(f"{name}.layer{layer}.widen", width, 8 * width, pixels)
        net.linear(f"{name}.layer{layer}.narrow", 4 * width, width, pixels)
    net.linear(f"{name}.out", width, width, pixels)


def _residual(net: Sketch, name: str, inputs: int, width: int, pixels: int) -> None:
    net.norm(f"{name}.norm0", inputs)
    net.conv(f"{name}.conv0", inputs, width, 3, pixels, bias=True)
    net.linear(f"{name}.time", TIME, width)
    net.norm(f"{name}.norm1", width)
    net.conv(f"{name}.conv1", width, width, 3, pixels, bias=True)
    if inputs != width:
        net.conv(f"{name}.shortcut", inputs, width, 1, pixels, bias=True)


def _attention(net: Sketch, name: str, width: int, seen: int, pixels: int, places: int) -> None:
    """Of `pixels` queries to `places` keys and values, which are made of vectors of `seen` elements."""
    net.norm(f"{name}.norm", width)
    net.linear(f"{name}.query", width, width, pixels, bias=False)
    for part in ("key", "value"):
        net.linear(f"{name}.{part}", seen, width, places, bias=False)
    net.linear(f"{name}.attended", width, width, pixels, extra=2 * pixels * places * width)
