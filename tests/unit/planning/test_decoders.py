"""Profiles by a size, and by a configuration of Hugging Face's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradwire.planning.decoders import of_config, of_size
from gradwire.planning.shapes import load

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
QWEN25 = {
    **LLAMA,
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
QWEN3 = {
    **LLAMA,
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}


def written(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(LLAMA, 8_030_261_248), (QWEN25, 7_615_616_512), (QWEN3, 596_049_920), (GPT2, 124_439_808)],
    ids=["llama-3-8b", "qwen2.5-7b", "qwen3-0.6b", "gpt2"],
)
def test_a_configuration_has_the_published_number_of_parameters(
    config: dict[str, Any], parameters: int, tmp_path: Path
) -> None:
    assert of_config(written(tmp_path, config)).parameters == parameters


@pytest.mark.parametrize(("config", "name"), [(LLAMA, "llama_3_8b"), (QWEN25, "qwen2_5_7b")])
def test_a_configuration_and_the_stored_profile_are_one_model(
    config: dict[str, Any], name: str, tmp_path: Path
) -> None:
    found, stored = of_config(written(tmp_path, config)), load(name)
    assert found.layers == stored.layers


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**LLAMA, "model_type": "mixtral"}, r"config\.json: model_type='mixtral' is none of llama"),
        ({"model_type": "gpt2", "n_embd": 768}, "config.json: the configuration says no n_"),
        ({**LLAMA, "hidden_size": None}, "config.json: "),
        ([], "config.json: "),
    ],
)
def test_what_is_not_known_is_refused_in_a_sentence(config: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        of_config(written(tmp_path, config))
    with pytest.raises(ValueError, match="none"):
        of_config(tmp_path / "none.json")


@pytest.mark.parametrize("parameters", [30_000_000, 124_000_000, 350_000_000, 7_000_000_000, 70_000_000_000])
def test_a_size_is_met_within_a_twentieth(parameters: int) -> None:
    profile = of_size(parameters)
    assert profile.parameters == pytest.approx(parameters, rel=0.05)
    assert profile.source.startswith("assumed: ")


def test_what_is_too_small_for_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 30M"):
        of_size(29_000_000)
