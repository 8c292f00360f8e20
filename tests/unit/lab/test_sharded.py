"""The modules that a bench of FSDP2 shards one by one."""

import torch
from torch import nn

from gradwire_lab.bench.settings import parse_entry
from gradwire_lab.bench.sharded import blocks, precision


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False))


def test_a_peer_has_the_types_that_it_names_and_no_others() -> None:
    both = precision(parse_entry("fsdp2(param_dtype=bfloat16, reduce_dtype=float32)", "peer"))
    assert (both.param_dtype, both.reduce_dtype) == (torch.bfloat16, torch.float32)
    one = precision(parse_entry("fsdp2(reduce_dtype=float16)", "peer"))
    assert (one.param_dtype, one.reduce_dtype) == (None, torch.float16)


def test_modules_that_share_a_parameter_are_gathered_together() -> None:
    model = layers()
    assert list(blocks(model)) == [*model]
    model[2].weight = model[0].weight
    assert list(blocks(model)) == [model[1]]


def test_a_parameter_that_is_shared_within_a_module_parts_nothing() -> None:
    block = layers()
    block[2].weight = block[0].weight
    model = nn.ModuleDict({"layers": nn.ModuleList([block, block, nn.Linear(8, 8)])})
    assert blocks(model) == [block, model["layers"][2]]
