"""Profiles of language models that have no file: by a number of parameters, or Hugging Face's configuration.

Shapes are those of the published architectures; only decoders are known. The multiply-adds are those of a
sequence of up to 2048 tokens.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.planning.shapes import Layer, Profile, Shape

MOST_TOKENS = 2048
WORDS = 50257
"""The vocabulary of GPT-2."""
FEWEST = 30_000_000
"""Parameters, at least, of a model given by its size: the vocabulary alone takes 3 million."""


@dataclass(frozen=True)
class Decoder:
    """A decoder-only transformer in numbers.

    Args:
        width: elements of a token's vector.
        layers: number of blocks, each of attention and a perceptron.
        wide: inner width of the perceptron, in elements.
        queries: elements of all heads' queries.
        keys: elements of all heads' keys, and of their values.
        words: size of the vocabulary.
        tokens: the longest sequence.
        gated: whether perceptrons have a third matrix, norms no shift, and positions are not learned.
        tied: whether the output layer shares the embedding's matrix.
        biases: whether matrices have biases, apart from those of `key_biases`.
        key_biases: whether the matrices of queries, keys and values have biases.
        head_norm: elements of the norms of each head's queries and keys; 0 without such norms.
    """

    width: int
    layers: int
    wide: int
    queries: int
    keys: int
    words: int
    tokens: int
    gated: bool
    tied: bool
    biases: bool
    key_biases: bool
    head_norm: int = 0

    def profile(self, model: str, source: str) -> Profile:
        """Its layers, in forward order. Attention's own products are charged to the projection after them."""
        tokens, width = min(self.tokens, MOST_TOKENS), self.width
        found = [Layer("words", 0, ((self.words, width),))]
        if not self.gated:
            found.append(Layer("positions", 0, ((self.tokens, width),)))
        for layer in range(self.layers):
            found += self._block(f"layer{layer}", tokens)
        output = self.words * width * tokens
        found.append(Layer("norm", output if self.tied else 0, self._norm))
        if not self.tied:
            found.append(Layer("output", output, ((self.words, width),)))
        return Profile(model, source, tuple(found))

    @property
    def _norm(self) -> tuple[Shape, ...]:
        return ((self.width,),) if self.gated else ((self.width,), (self.width,))

    def _block(self, name: str, tokens: int) -> list[Layer]:
        width, queries, keys, wide = self.width, self.queries, self.keys, self.wide
        attention = 2 * tokens * tokens * queries
        heads = [(f"{each}_norm", 0, [(self.head_norm,)]) for each in ("query", "key") if self.head_norm]
        matrices = [
            ("query", queries, width, self.key_biases, 0),
            ("key", keys, width, self.key_biases, 0),
            ("value", keys, width, self.key_biases, 0),
            ("attended", width, queries, self.biases, attention),
        ]
        perceptron = [("widen", wide, width, self.biases, 0), ("narrow", width, wide, self.biases, 0)]
        if self.gated:
            perceptron.insert(0, ("gate", wide, width, self.biases, 0))

        def of(rows: list[tuple[str, int, int, bool, int]]) -> list[Layer]:
            return [
                Layer(f"{name}.{part}", out * inputs * tokens + extra, ((out, inputs), *[(out,)] * bias))
                for part, out, inputs, bias, extra in rows
            ]

        return [
            Layer(f"{name}.norm1", 0, self._norm),
            *of(matrices),
            *(Layer(f"{name}.{part}", macs, tuple(shapes)) for part, macs, shapes in heads),
            Layer(f"{name}.norm2", 0, self._norm),
            *of(perceptron),
        ]


def of_size(parameters: int) -> Profile:
    """A transformer of about that many parameters, with the proportions of GPT-2 and GPT-3.

    Its width is 32 to 128 times its number of layers. Raises `ValueError` for fewer than `FEWEST`.

    >>> of_size(350_000_000).source
    'assumed: a transformer of 18 layers, 1152 wide, with the vocabulary of GPT-2'
    """
    if parameters < FEWEST:
        raise ValueError(f"params={parameters}: at least {FEWEST / 1e6:.0f}M, or give the shapes themselves")

    def off(shape: tuple[int, int]) -> float:
        layers, width = shape
        numel = 12 * layers * width * width + WORDS * width
        return abs(numel / parameters - 1.0) + 0.05 * abs(math.log(width / layers / 64))

    shapes = [
        (layers, width)
        for layers in range(2, 129)
        for width in range(64, 16385, 64)
        if 32 <= width / layers <= 128
    ]
    layers, width = min(shapes, key=off)
    source = f"assumed: a transformer of {layers} layers, {width} wide, with the vocabulary of GPT-2"
    made = Decoder(width, layers, 4 * width, width, width, WORDS, 1024, False, True, True, True)
    return made.profile(f"about {parameters / 1e6:.4g} M parameters", source)


GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma")
"""The `model_type`s of which all layers are alike, gated, and with the same norms."""


def of_config(path: Path) -> Profile:
    """The model of a Hugging Face `config.json`. Raises `ValueError` for a kind that is not known.

    Known are decoders of the types of `GATED`, and `gpt2`. Mixtures of experts are not.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        kind = raw.get("model_type")
        if kind not in (*GATED, "gpt2"):
            known = ", ".join((*GATED, "gpt2"))
            raise ValueError(f"model_type={kind!r} is none of {known}; give the shapes themselves")
        made = _gpt2(raw) if kind == "gpt2" else _gated(kind, raw)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: it is no JSON, as a config.json has to be: {error}") from error
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
    except KeyError as error:
        raise ValueError(f"{path}: the configuration says no {error.args[0]}") from error
    name = str(raw.get("_name_or_path") or path.parent.resolve().name or kind)
    tokens = min(made.tokens, MOST_TOKENS)
    return made.profile(
        name, f"{kind} by {path.name}, {tokens} tokens; as plain data parallelism, not sharded"
    )


def _gated(kind: str, raw: dict[str, Any]) -> Decoder:
    width, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
    head = int(raw.get("head_dim") or width // heads)
    biases = bool(raw.get("attention_bias", False))
    return Decoder(
        width,
        int(raw["num_hidden_layers"]),
        int(raw["intermediate_size"]),
        heads * head,
        int(raw.get("num_key_value_heads") or heads) * head,
        int(raw["vocab_size"]),
        int(raw.get("max_position_embeddings", MOST_TOKENS)),
        gated=True,
        tied=bool(raw.get("tie_word_embeddings", kind == "gemma")),
        biases=False,
        key_biases=biases or kind == "qwen2",
        head_norm=head if kind == "qwen3" else 0,
    )


def _gpt2(raw: dict[str, Any]) -> Decoder:
    width = int(raw["n_embd"])
    wide = int(raw.get("n_inner") or 4 * width)
    tokens = int(raw.get("n_positions", 1024))
    layers, words = int(raw["n_layer"]), int(raw["vocab_size"])
    return Decoder(width, layers, wide, width, width, words, tokens, False, True, True, True)
