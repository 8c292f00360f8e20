"""DDP over NCCL, with the one rank that one GPU allows: what torch promises of futures and streams."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import recipes
from gradwire._api.configuration import PlacementName
from tests.gpu.outcomes import Skip, Tell, each
from tests.support.recipes import EVERY_RECIPE
from tests.support.where import WHERE

STEPS, BAD, WARM = 6, 3, 3


@dataclass(frozen=True)
class Setting:
    """How a training is written."""

    width: int = 64
    views: bool = False
    accumulates: bool = False
    scaled: bool = False
    compiled: bool = False
    own_stream: bool = False
    normalised: bool = False
    no_waits: bool = False
    from_step: int = 0
    """The first of `no_waits`. In earlier ones kernels are compiled, and tables copied to the device."""
    place: PlacementName = "device"


def run(tell: Tell, match: str | None = None) -> None:
    """Every setting beside DDP without gradwire, and some recipes."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device())
    # A rank that is alone sends nothing and would compress nothing.
    with patch("gradwire._api.attach.is_alone", lambda _comm: False):
        each(
            tell,
            {
                "dense is DDP": partial(same_as_ddp, Setting()),
                "dense is DDP, by way of the host": partial(same_as_ddp, Setting(place="host")),
                "large buckets, used at once": partial(same_as_ddp, Setting(width=4096)),
                "gradient_as_bucket_view": partial(same_as_ddp, Setting(views=True)),
                "no_sync": partial(same_as_ddp, Setting(accumulates=True)),
                "GradScaler, one step of NaN": partial(same_as_ddp, Setting(scaled=True)),
                "a stream of the user's": partial(same_as_ddp, Setting(own_stream=True, width=1024)),
                "no wait for the device in backward": partial(same_as_ddp, Setting(no_waits=True)),
                "no wait for the loss scale": partial(same_as_ddp, Setting(no_waits=True, scaled=True)),
                "no wait for buffers that are compared": partial(
                    same_as_ddp, Setting(no_waits=True, normalised=True)
                ),
                "no wait for it by way of the host": partial(
                    same_as_ddp, Setting(no_waits=True, place="host")
                ),
                **{
                    f"no wait with {label} from step {WARM} on": partial(
                        goes_on, text, Setting(width=256, no_waits=True, from_step=WARM)
                    )
                    for label, text in EVERY_RECIPE.items()
                    if _never_waits(text)
                },
                "torch.compile": partial(same_as_ddp, Setting(compiled=True)),
                "a captured graph is refused": captured,  # last: what follows an ended capture is torch's
            },
        )
    dist.destroy_process_group()


def _never_waits(text: str) -> bool:
    """Whether a recipe has the host read nothing, neither what is sent nor the times by which some adapt."""
    built = recipes.recipe(text).build()
    return built.exchange.laws.stays_on_device and built.next is None and built.watch is None


def device() -> torch.device:
    """The first one."""
    return torch.device(WHERE.type, 0)


def trained(setting: Setting, recipe: str | None) -> tuple[list[Tensor], gradwire.Wire | None]:
    """Parameters after some steps, without gradwire if there is no recipe."""
    torch.manual_seed(0)
    width = setting.width
    middle = nn.BatchNorm1d(width) if setting.normalised else nn.Tanh()
    layers = nn.Sequential(nn.Linear(width, width), middle, nn.Linear(width, width)).to(device())
    ddp = DistributedDataParallel(layers, device_ids=[0], gradient_as_bucket_view=setting.views)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)
    scaler = torch.amp.GradScaler("cuda", init_scale=64.0, enabled=setting.scaled)
    wire = None
    if recipe is not None:
        scaling = scaler if setting.scaled else None
        wire = gradwire.attach(ddp, optimizer, recipe, scaler=scaling, placement=setting.place)
    model = torch.compile(ddp) if setting.compiled else ddp
    with torch.cuda.stream(torch.cuda.Stream()) if setting.own_stream else nullcontext():
        for step in range(STEPS):
            optimizer.zero_grad()
            for last in (False, True) if setting.accumulates else (True,):
                inputs = torch.randn(16, width, generator=torch.Generator().manual_seed(2 * step + last))
                if setting.scaled and step == BAD:
                    inputs[0, 0] = torch.nan
                inputs = inputs.to(device())
                with ExitStack() as held:
                    if not last:
                        held.enter_context(ddp.no_sync())
                    loss = scaler.scale(model(inputs).square().mean())
                    if setting.no_waits and step >= setting.from_step:
                        held.callback(torch.cuda.set_sync_debug_mode, 0)
                        torch.cuda.set_sync_debug_mode("error")
                    loss.backward()
            scaler.step(optimizer)
            scaler.update()
    torch.cuda.synchronize()
    return [p.detach().clone() for p in ddp.parameters()], wire


def same_as_ddp(setting: Setting) -> None:
    """The mean of one rank is its gradient, so the bits are DDP's."""
    expected, _ = trained(setting, None)
    found, wire = trained(setting, "dense")
    if not all(map(torch.equal, found, expected)):
        worst = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
        raise AssertionError(f"parameters differ from DDP's by up to {worst}")
    assert wire is not None
    skipped = int(setting.scaled)
    steps = wire.report().step
    if steps != STEPS - skipped:
        raise AssertionError(f"{steps} steps counted, of {STEPS} with {skipped} skipped")


def goes_on(text: str, setting: Setting = Setting(width=256)) -> str:
    """Compresses and learns: parameters stay finite, and all steps count."""
    found, wire = trained(setting, text)
    assert wire is not None
    if not all(bool(each.isfinite().all()) for each in found):
        raise AssertionError("parameters are not finite")
    report = wire.report()
    if report.step != STEPS:
        raise AssertionError(f"{report.step} of {STEPS} steps counted")
    return f"{report.placement}, {report.pinned_bytes / 2**20:.2f} MiB pinned, {report.copied_s * 1e3:.2f} ms"


def captured() -> None:
    """A backward pass inside a graph raises, and names the reason."""
    if not hasattr(torch.cuda, "CUDAGraph"):
        raise Skip("this torch captures no graphs")
    # As torch wants it of DDP: on another stream than the first, and after ten steps in which it takes times.
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model = DistributedDataParallel(nn.Linear(8, 8).to(device()), device_ids=[0])
        gradwire.attach(model, recipe="int8")
        inputs = torch.ones(2, 8, device=device())
        for _ in range(11):
            model(inputs).sum().backward()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            model(inputs).sum().backward()
    except Exception as error:
        # The end of the capture raises an error of its own, during this one.
        said, inner = "", error.__context__
        while inner is not None:
            said, inner = f"{said}\n{inner}", inner.__context__
        if "captured into a graph" not in f"{error}{said}":
            raise
    else:
        raise AssertionError("nothing was raised")
