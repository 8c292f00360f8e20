"""How the text that names a workload becomes one."""

from pathlib import Path
from typing import Any

from gradwire.planning.shapes import load
from gradwire_lab.data import load_images, load_text
from gradwire_lab.workloads.base import Shards, Workload, check_shards
from gradwire_lab.workloads.emulated import EmulatedWorkload
from gradwire_lab.workloads.images import ImageWorkload, TrainingRecipe
from gradwire_lab.workloads.models import ConvNet, resnet18, resnet_demo
from gradwire_lab.workloads.own import OwnWorkload
from gradwire_lab.workloads.profile import timing
from gradwire_lab.workloads.spec import EMULATED, WorkloadSpec, read
from gradwire_lab.workloads.text import Size, TextWorkload

_IMAGES = {
    "resnet18": TrainingRecipe(resnet18, batch_size=16, learning_rate=0.02),
    "resnet_demo": TrainingRecipe(resnet_demo, batch_size=32, learning_rate=0.05),
    "convnet": TrainingRecipe(ConvNet, batch_size=16, learning_rate=0.02),
}
_TEXTS = {"chargpt": (Size(), 6)}


def workload(
    text: str,
    *,
    data: Path | None = None,
    shards: Shards = "iid",
    batch_size: int | None = None,
    full: bool = True,
) -> Workload:
    """The workload that `text` names: "resnet18", "emulated(vgg19, shrink=16)", "package.module:make".

    Args:
        data: the user's own data instead of Fashion-MNIST or Shakespeare (`gradwire_lab.data`).
        shards: "iid", or "skewed" for shards that differ between ranks: sorted by label for images,
            consecutive stretches for text.
        batch_size: samples per rank and step instead of the workload's own.
        full: use full data sets where they are installed, not the vendored slices.
    """
    check_shards(shards)
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    spec = read(text)
    if ":" in spec.name:
        if data is not None or shards != "iid" or batch_size is not None:
            raise ValueError(f"{spec.name} has batches of its own: leave out data, shards and batch size")
        return OwnWorkload(spec.name)
    # Data, shards and batch size mean nothing to emulated networks.
    return _emulated(spec) if spec.model else _trained(spec.name, data, shards, batch_size, full)


def _trained(name: str, data: Path | None, shards: Shards, batch_size: int | None, full: bool) -> Workload:
    options: dict[str, Any] = {"shards": shards}
    if name in _TEXTS:
        size, default = _TEXTS[name]
        return TextWorkload(
            name, size, load_text(data, full=full), batch_size=batch_size or default, **options
        )
    recipe = _IMAGES[name]
    images = load_images(data, full=full)
    return ImageWorkload(name, recipe, images, batch_size=batch_size or recipe.batch_size, **options)


def _emulated(spec: WorkloadSpec) -> EmulatedWorkload:
    profile = load(str(spec.model))
    shrink, time_scale = (spec.options.get(key, 1.0) for key in EMULATED)
    return EmulatedWorkload(profile, timing(profile), shrink, time_scale)
