"""The modules that a bench of FSDP2 shards one by one."""

from torch import nn

from gradwire.lab.bench.sharded import blocks


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False))


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
