"""What is asked of torch's own objects of FSDP2, and what is said if they are others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.torch_version import TorchVersion

import gradwire
from gradwire.integrations.dcp import WireState
from gradwire.sources.fsdp.modules import modules_of, scattered_type, shards_in

pytestmark = pytest.mark.usefixtures("world_of_one")


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


@pytest.mark.parametrize("how", [{"gather": "int8"}, {"replicas": True}])
@pytest.mark.parametrize(
    ("owner", "name"),
    [("FSDPParamGroup", "mesh_info"), ("FSDPParam", "mp_policy"), ("FSDPParam", "padded_sharded_param_size")],
)
def test_a_torch_without_a_name_is_refused_with_the_name_and_the_versions(
    owner: str, name: str, how: dict[str, Any]
) -> None:
    model = _model()
    [module] = modules_of(model)
    delattr(module.group if owner == "FSDPParamGroup" else module.group.fsdp_params[1], name)
    options = {"replicas": dist.group.WORLD} if "replicas" in how else how
    with pytest.raises(ValueError, match=f"{owner} has no {name}. Install torch 2.11 to 2.15") as raised:
        gradwire.attach(model, None, "int8", **options)
    assert torch.__version__ in str(raised.value)


def test_a_torch_that_groups_parameters_otherwise_is_refused() -> None:
    model = _model()
    state: Any = model._get_fsdp_state()  # type: ignore[operator]
    name = "_fsdp_param_groups" if hasattr(state, "_fsdp_param_groups") else "_fsdp_param_group"
    kind = type("FSDPState", (), {})  # neither name
    model._get_fsdp_state = kind  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"FSDPState has no _fsdp_param_group\b"):
        modules_of(model)
    assert hasattr(state, name)


@pytest.mark.parametrize(
    ("owner", "name"), [("FSDPState", "_state_ctx"), ("FSDPParamGroup", "_post_forward_indices")]
)
def test_a_torch_that_cannot_be_led_out_of_a_broken_pass_is_refused(
    monkeypatch: pytest.MonkeyPatch, owner: str, name: str
) -> None:
    monkeypatch.delattr(FSDPModule, "reset_iter_state", raising=False)
    model = _model()
    [module] = modules_of(model)
    delattr(module.group if owner == "FSDPParamGroup" else model._get_fsdp_state(), name)  # type: ignore[operator]
    with pytest.raises(ValueError, match=f"{owner} has no {name}. Install torch 2.11 to 2.15"):
        modules_of(model)


def test_parameters_are_scattered_in_the_order_that_torch_tells() -> None:
    model = _model()
    [module] = modules_of(model)
    assert module.names == ("0.weight", "0.bias", "1.weight", "1.bias")
    module.group._reduce_scatter_param_indices = [3, 1, 0, 2]
    assert module.trained() == (3, 1, 0, 2)
    module.group.fsdp_params[1].sharded_param.requires_grad_(False)
    assert module.trained() == (3, 0, 2)


class _Overriding(NamedTuple):
    """The part of a `MixedPrecisionPolicy` of torch 2.15 that is looked at."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    param_dtype_override_fn: Callable[[Tensor], torch.dtype | None] | None = None


@pytest.mark.parametrize("owner", ["module", "parameter"])
def test_a_policy_that_overrides_types_is_refused_where_gathers_are_coded(owner: str) -> None:
    for override in (None, lambda _parameter: torch.bfloat16):
        for gather in (None, "int8"):
            model = _model()
            [module] = modules_of(model)
            policy = _Overriding(None, None, override)
            if owner == "parameter":
                module.group.fsdp_params[1].mp_policy = policy
            else:
                model._get_fsdp_state()._mp_policy = policy  # type: ignore[operator]
            if gather and override:
                with pytest.raises(ValueError, match="the policy of module 'the root' has param_dtype_over"):
                    gradwire.attach(model, None, "int8", gather=gather)  # type: ignore[arg-type]
            else:
                gradwire.attach(model, None, "int8", gather=gather)  # type: ignore[arg-type]


def test_a_state_for_dcp_says_how_to_save_instead() -> None:
    wire = gradwire.attach(_model(), None, "int8")
    with pytest.raises(ValueError, match=r"save that by wire\.save\(folder\)"):
        WireState(wire)


def test_shards_are_known_by_all_that_the_model_shows() -> None:
    model = _model()
    masters = list(model.parameters())
    model.unshard()  # type: ignore[operator]
    shown = list(model.parameters())
    assert not {id(each) for each in shown} & {id(each) for each in masters}
    found = shards_in(model)
    assert [found[id(each)] is master for each, master in zip(shown, masters, strict=True)] == [True] * 4
    assert [found[id(each)] is each for each in masters] == [True] * 4


@pytest.mark.parametrize(
    ("version", "reduced", "scattered"),
    [("2.14.1", None, "bfloat16"), ("2.15.0+cu132", None, "float32"), ("2.15.0", "bfloat16", "bfloat16")],
)
def test_gradients_are_scattered_in_the_type_that_this_torch_chooses(
    monkeypatch: pytest.MonkeyPatch, version: str, reduced: str | None, scattered: str
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    policy = MixedPrecisionPolicy(torch.bfloat16, None if reduced is None else getattr(torch, reduced))
    assert scattered_type(policy, torch.float32) == getattr(torch, scattered)
