"""The policy of a bench run: what may be written, and who travels how by it."""

import pytest
import torch

from gradwire.recipes import recipe
from gradwire.step.layout import build
from gradwire.unit.parameters import ParameterSpec
from gradwire_lab.bench.runner import check
from gradwire_lab.bench.settings import NetworkSetting, Repetitions, Settings, TrainingTask
from gradwire_lab.bench.table import title
from gradwire_lab.bench.trainer import policy_of

SPECS = tuple(
    ParameterSpec(name, shape, torch.float32, torch.Size(shape).numel())
    for name, shape in (("head.bias", (10,)), ("head.weight", (10, 20)), ("body", (50, 60)))
)


def remembered(text, policy):
    """The recipe of every flat buffer with memory, by parameter."""
    layout = build(SPECS, recipe(text).build(), policy, torch.device("meta"), world=2)
    return {
        name: type(flat_buffer.exchange).__name__ for name, (flat_buffer, _slot) in layout.slots.items()
    }.keys()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("none", {"head.bias", "head.weight", "body"}),
        ("by_size", {"body"}),
        ("by_size(smallest=200)", {"head.weight", "body"}),
        (" by_size( smallest = 201, recipe=fp16 ) ", {"body"}),
        ("by_size(smallest=201, recipe='topk(ratio=0.5)')", {"head.bias", "head.weight", "body"}),
        ("head.*=dense", {"body"}),
        ("*.bias=bf16; head.*=covap(interval=2); *=dense;", {"head.weight"}),
    ],
)
def test_who_is_remembered(text, names):
    assert remembered("topk(ratio=0.1)", policy_of(text)) == names


def test_by_size_leaves_tiny_tensors_to_the_recipe_as_the_default_policy_does():
    for text in ("dgc(ratio=0.1)", "fp16", "topk(ratio=0.1)"):
        layouts = [
            build(SPECS, recipe(text).build(), policy, torch.device("meta"), world=2)
            for policy in (None, policy_of("by_size(smallest=2048)"))
        ]
        assert layouts[0].direct == layouts[1].direct
        assert [len(each.flat_buffers) for each in layouts] == [
            {"dgc(ratio=0.1)": 2, "fp16": 0}.get(text, 1)
        ] * 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected none, by_size"),
        ("nothing", "expected none, by_size"),
        ("*.bias", "expected none, by_size"),
        ("*.bias=", "expected none, by_size"),
        ("=dense", "expected none, by_size"),
        ("by_sizes(smallest=2)", "expected none, by_size"),
        ("by_size(smalest=2)", "expected none, by_size"),
        ("by_size(smallest=few)", "smallest='few' must be a number of elements"),
        ("by_size(recipe=nosuch)", "unknown recipe 'nosuch'"),
        ("a=dense;a=fp16", "given twice"),
        ("a=nosuch", "unknown recipe 'nosuch'"),
        ("a=covap", "must measure before it can decide"),
    ],
)
def test_what_is_no_policy_is_refused_before_anything_starts(text, words):
    task, link = TrainingTask("convnet", policy=text), NetworkSetting(2, "1gbit", "0", "root")
    with pytest.raises(ValueError, match=words):
        check(Settings(task, Repetitions(), link, ()))


@pytest.mark.parametrize(
    ("policy", "suggested", "shown"),
    [
        (None, None, None),
        (None, "by_size(smallest=64)", "policy by_size(smallest=64)"),
        ("none", "by_size(smallest=64)", "policy none"),
    ],
)
def test_a_policy_other_than_the_default_is_above_the_table(policy, suggested, shown):
    settings = {
        "workload": "w",
        "workers": 2,
        "rate": "1gbit",
        "delay": "0",
        "mode": "root",
        "policy": policy,
    }
    text = title(settings | {"workload_facts": {"suggested_policy": suggested}})
    assert text.endswith(shown) if shown else "policy" not in text
