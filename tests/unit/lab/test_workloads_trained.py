"""Real workloads: sizes, determinism, shards, and that they learn."""

import pytest
import torch

from gradwire_lab.workloads.catalogue import workload
from gradwire_lab.workloads.images import ImageWorkload
from gradwire_lab.workloads.spec import names
from gradwire_lab.workloads.text import TextWorkload

SIZES = {"resnet18": 11_172_810, "resnet_demo": 174970, "convnet": 87_690, "chargpt": 2_405_632}


def local(spec: str, **options):
    """The workload on the vendored slice, so that a test does not depend on what is installed."""
    return workload(spec, full=False, **options)


@pytest.mark.parametrize("name", SIZES)
def test_parameter_count(name):
    work = local(name)
    assert sum(p.numel() for p in work.model(0).parameters()) == SIZES[name]
    assert work.describe()["parameters"] == SIZES[name]


@pytest.mark.parametrize("name", SIZES)
def test_model_is_a_function_of_its_seed_and_leaves_the_global_generator_alone(name):
    before = torch.get_rng_state()
    first, again, other = (local(name).model(seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", ["convnet", "chargpt"])
def test_batches_repeat_for_the_same_rank_and_seed_only(name):
    def first(rank, seed):
        batches = local(name).batches(rank, 2, seed)
        return torch.cat([next(batches)[0].flatten() for _ in range(3)])

    assert torch.equal(first(0, 1), first(0, 1))
    assert not torch.equal(first(0, 1), first(1, 1))
    assert not torch.equal(first(0, 1), first(0, 2))


def test_batches_do_not_end_and_visit_every_image_of_the_shard_once_per_epoch():
    work = local("convnet", batch_size=1000)
    batches = work.batches(1, 2, seed=0)
    epoch = [next(batches)[0] for _ in range(6)]
    seen = torch.cat(epoch).flatten(1).double().sum(dim=1).sort().values
    following = torch.cat([next(batches)[0] for _ in range(6)]).flatten(1).double().sum(dim=1).sort().values
    assert torch.equal(seen, following)
    assert not torch.equal(epoch[0], next(batches)[0])


@pytest.mark.parametrize("shards", ["iid", "skewed"])
@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("name", ["convnet", "chargpt"])
def test_shards_are_disjoint_and_of_equal_length(name, world, shards):
    work = local(name, shards=shards)
    assert isinstance(work, ImageWorkload | TextWorkload)
    mine = [work.shard(rank, world, seed=5) for rank in range(world)]
    assert len({len(indices) for indices in mine}) == 1
    every = torch.cat(mine)
    assert len(every.unique()) == len(every)
    whole = work.describe()["train_examples"]
    assert whole - world < len(every) <= whole


def test_skewed_shards_hold_different_classes():
    for shards, expected in (("skewed", 5), ("iid", 10)):
        batches = [local("convnet", shards=shards, batch_size=200).batches(rank, 2, 0) for rank in (0, 1)]
        classes = [set(next(it)[1].tolist()) for it in batches]
        assert [len(found) for found in classes] == [expected, expected]
        assert (not classes[0] & classes[1]) == (shards == "skewed")


def test_images_are_normalised_and_padded_to_32_pixels():
    images, labels = next(local("resnet18").batches(0, 1, 0))
    assert images.shape == (16, 1, 32, 32)
    assert labels.shape == (16,)
    many, _ = next(local("resnet18", batch_size=2000).batches(0, 1, 0))
    inner = many[:, :, 2:-2, 2:-2]
    assert abs(float(inner.mean())) < 0.05
    assert abs(float(inner.std()) - 1) < 0.05


def test_text_targets_are_the_following_characters():
    codes, following = next(local("chargpt").batches(0, 2, 0))
    assert codes.shape == following.shape == (6, 64)
    assert torch.equal(codes[:, 1:], following[:, :-1])


def test_the_transformer_does_not_see_what_it_predicts():
    work = local("chargpt")
    model = work.model(0)
    codes, _ = next(work.batches(0, 1, 0))
    changed = codes.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 10
    torch.testing.assert_close(model(codes)[:, :-1], model(changed)[:, :-1])
    assert not torch.equal(model(codes)[:, -1], model(changed)[:, -1])


def test_convnet_learns_in_forty_steps():
    work = local("convnet", batch_size=32)
    model = work.model(0)
    start = work.evaluate(model)
    optimizer, batches = work.optimizer(model.parameters()), work.batches(0, 1, 0)
    for _ in range(40):
        optimizer.zero_grad()
        work.loss(model, next(batches)).backward()
        optimizer.step()
    end = work.evaluate(model)
    assert model.training
    # chance is 0.1; 40 steps reach about 0.6
    assert end["test_accuracy"] > 0.4
    assert end["test_loss"] < start["test_loss"] - 0.5


@pytest.mark.rest
def test_chargpt_learns_in_ten_steps():
    work = local("chargpt", batch_size=2)
    model = work.model(0)
    optimizer, batches = work.optimizer(model.parameters()), work.batches(0, 1, 0)
    start = work.evaluate(model)["test_loss"]
    for _ in range(10):
        optimizer.zero_grad()
        work.loss(model, next(batches)).backward()
        optimizer.step()
    assert work.evaluate(model)["test_loss"] < start - 0.3


def test_describe_names_the_data_that_is_used():
    assert "vendored" in local("convnet").describe()["data"]
    assert "vendored" in local("chargpt").describe()["data"]


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("resnet_19", "did you mean 'resnet18'"),
        ("emulated(vgg18)", "did you mean 'vgg1"),
        ("emulated()", "known: alexnet"),
        ("emulated(vgg19, shrnk=4)", "did you mean 'shrink'"),
        ("emulated(vgg19, shrink=big)", "must be a number"),
        ("emulated(vgg19, shrink=0.5)", "must be at least 1"),
        ("emulated(vgg19, shrink=1000000)", "too much for vgg19"),
        ("emulated(vgg19, time_scale=0)", "must be above 0"),
        ("convnet(3)", "takes no arguments"),
        ("convnet; import os", "must look like"),
        ("a.b(c)", "must look like"),
    ],
)
def test_bad_specifications_are_refused_with_a_hint(spec, hint):
    with pytest.raises(ValueError, match=hint.replace("(", r"\(")):
        local(spec)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="shards='sorted' must be one of iid, skewed"):
        local("convnet", shards="sorted")
    with pytest.raises(ValueError, match="batch_size=0"):
        local("convnet", batch_size=0)
    with pytest.raises(ValueError, match="rank=2"):
        local("convnet").batches(2, 2, 0)
    with pytest.raises(ValueError, match="exceeds rank 0's shard of 6000"):
        local("convnet", batch_size=6001).batches(0, 2, 0)


def test_a_text_without_a_window_to_test_on_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("to be, or not to be: " * 20)
    with pytest.raises(ValueError, match="fewer than one window"):
        workload("chargpt", data=tmp_path / "short.txt").batches(0, 2, 0)


def test_every_listed_name_is_a_workload():
    for name in names():
        assert local(name).name == name
