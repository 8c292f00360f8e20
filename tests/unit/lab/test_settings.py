"""Reading the lists of the command line."""

import pytest

from gradwire_lab.bench.peers import check_peer, wire_bytes
from gradwire_lab.bench.runner import check
from gradwire_lab.bench.settings import NetworkSetting as LinkSettings
from gradwire_lab.bench.settings import Repetitions, Settings, TrainingTask, parse_entries, parse_entry


def test_names_are_kept_as_typed():
    entries = parse_entries(" dense; covap( interval = 4 ) ;", "recipe")
    assert [entry.name for entry in entries] == ["dense", "covap( interval = 4 )"]
    assert [entry.stem for entry in entries] == ["dense", "covap"]
    assert dict(entries[1].options) == {"interval": 4}


def test_bare_words_are_text():
    assert dict(parse_entry("leader_topk(ratio=0.1, elect=norm)", "recipe").options) == {
        "ratio": 0.1,
        "elect": "norm",
    }


def test_tuples_and_dictionaries_of_options_are_read():
    text = "covap(interval=4, edges=(0.5, 0.9)); scalecom(rates={'a.*': 25, 'b': 400})"
    covap, scalecom = parse_entries(text, "recipe")
    assert dict(covap.options) == {"interval": 4, "edges": (0.5, 0.9)}
    assert dict(scalecom.options) == {"rates": {"a.*": 25, "b": 400}}


@pytest.mark.parametrize(
    "text",
    [
        "topk(0.1)",
        "topk(ratio=",
        "top k",
        "topk(ratio=[1])",
        "topk(ratio=(1, [2]))",
        "3",
        "x(a=1, a=2)",
        "x(a={[]: 1})",
    ],
)
def test_what_cannot_be_read_is_refused(text):
    with pytest.raises(ValueError, match=r"expected|option|number"):
        parse_entry(text, "recipe")


def test_a_pair_is_a_scatter_and_the_bits_of_gathers():
    pair = parse_entry("int4(block=64) + int8", "recipe")
    assert (pair.name, pair.stem, dict(pair.options)) == ("int4(block=64) + int8", "int4", {"block": 64})
    with pytest.raises(ValueError, match="expected"):
        parse_entry("ddp+int8", "peer")


def settings(text, kind="recipe", **task):
    entries = parse_entries(text, kind)
    return Settings(
        TrainingTask("convnet", **task), Repetitions(), LinkSettings(2, "1gbit", "0", "root"), entries
    )


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("ddp", "peer", "the only peer is fsdp2"),
        ("fsdp2(param_dtype=bloat16)", "peer", "the only peer is fsdp2"),
        ("fsdp2(buffer_dtype=bfloat16)", "peer", "the only peer is fsdp2"),
        ("fsdp2(param_dtype=int8)", "peer", "the only peer is fsdp2"),
        ("topk+int8", "recipe", "not for FSDP2's own scatters"),
        ("int8+int4", "recipe", "after the plus stands bf16, int8 or exact"),
    ],
)
def test_what_fsdp2_has_not_is_refused_before_anything_starts(text, kind, words):
    with pytest.raises(ValueError, match=words):
        check(settings(text, kind, sharded=True))


def test_what_only_fsdp2_has_goes_with_its_option():
    check(settings("int4(feedback=False)+int8;dense;bf16+bf16", sharded=True))
    check(settings("fsdp2; fsdp2(param_dtype=bfloat16, reduce_dtype=float32)", "peer", sharded=True))
    for text, kind in (("int8+int8", "recipe"), ("fsdp2", "peer")):
        with pytest.raises(ValueError, match="--sharded"):
            check(settings(text, kind))


@pytest.mark.parametrize("task", [{"policy": "none"}, {"overlap": False}, {"bucket_cap_mb": 1.0}])
def test_options_of_ddp_are_refused_under_fsdp2(task):
    with pytest.raises(ValueError, match="no meaning for FSDP2"):
        TrainingTask("convnet", sharded=True, **task)


def test_the_same_entry_twice_is_refused():
    with pytest.raises(ValueError, match="twice: dense"):
        parse_entries("dense;fp16;dense", "recipe")


def test_an_unknown_peer_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'fp16_hook'"):
        check_peer(parse_entry("fp16hook", "peer"))


@pytest.mark.parametrize("text", ["powersgd_hook(rnak=2)", "fp16_hook(rank=2)"])
def test_an_option_that_a_peer_does_not_have_is_refused_before_anything_starts(text):
    with pytest.raises(ValueError, match="unexpected keyword"):
        check_peer(parse_entry(text, "peer"))
    check_peer(parse_entry("powersgd_hook(rank=2, bucket_cap_mb=100)", "peer"))


def test_bytes_of_a_ring_all_reduce():
    # 2 (N - 1) / N payloads leave every rank
    assert wire_bytes(parse_entry("ddp", "peer"), 1000, 4) == 6000
    assert wire_bytes(parse_entry("fp16_hook", "peer"), 1000, 2) == 2000
    assert wire_bytes(parse_entry("powersgd_hook", "peer"), 1000, 2) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: TrainingTask("convnet", shards="odd"),
        lambda: TrainingTask("convnet", batch_size=0),
        lambda: Repetitions(steps=0),
        lambda: Repetitions(timeout_s=0.0),
        lambda: LinkSettings(1, "1gbit", "0", "root"),
    ],
)
def test_impossible_settings_are_refused(make):
    with pytest.raises(ValueError, match=r"expected|needs at least"):
        make()


@pytest.mark.parametrize("kind", ["peer", "recipe"])
def test_a_run_with_an_unknown_name_is_refused(kind):
    link = LinkSettings(2, "1gbit", "0", "root")
    with pytest.raises(ValueError, match="nosuch"):
        check(Settings(TrainingTask("convnet"), Repetitions(), link, parse_entries("nosuch", kind)))
