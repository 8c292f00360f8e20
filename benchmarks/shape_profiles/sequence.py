"""Networks over text and speech; `places` is the number of positions per sample."""

from __future__ import annotations

from sketch import Sketch


def bert(size: str, width: int, layers: int) -> Sketch:
    net = Sketch(f"BERT-{size}, uncased (Devlin et al. 2018), with pooler and without task head, 128 tokens")
    places = 128
    for name, entries in (("words", 30522), ("positions", 512), ("segments", 2)):
        net.embedding(f"embeddings.{name}", entries, width)
    net.norm("embeddings.norm", width)
    for layer in range(layers):
        name = f"layer{layer}"
        _attention(net, name, width, places)
        net.norm(f"{name}.norm1", width)
        _perceptron(net, name, width, places)
        net.norm(f"{name}.norm2", width)
    net.linear("pooler", width, width)
    return net


def gpt2(source: str, width: int, layers: int, places: int = 1024, words: int = 50257) -> Sketch:
    net = Sketch(source)
    net.embedding("words", words, width)
    net.embedding("positions", places, width)
    for layer in range(layers):
        name = f"layer{layer}"
        net.norm(f"{name}.norm1", width)
        net.linear(f"{name}.query_key_value", width, 3 * width, places, extra=2 * places * places * width)
        net.linear(f"{name}.attended", width, width, places)
        net.norm(f"{name}.norm2", width)
        _perceptron(net, name, width, places)
    # the tied output layer's arithmetic has no parameter of its own: it delays what comes before it
    net.add("norm", words * width * places, (width,), (width,))
    return net


def llama_7b() -> Sketch:
    source = "LLaMA-7B (Touvron et al. 2023), 2048 tokens"
    return _gated(source, width=4096, wide=11008, layers=32, keys=4096, words=32000)


def llama_3_8b() -> Sketch:
    source = "Llama 3 8B (Llama Team 2024, table 3), 2048 tokens"
    return _gated(source, width=4096, wide=14336, layers=32, keys=1024, words=128256)


def qwen2_5_7b() -> Sketch:
    source = "Qwen2.5-7B (Qwen Team 2024), 2048 tokens"
    return _gated(source, width=3584, wide=18944, layers=28, keys=512, words=152064, biases=True)


def _gated(
    source: str, *, width: int, wide: int, layers: int, keys: int, words: int, biases: bool = False
) -> Sketch:
    """A decoder with gated perceptrons; `keys` is the width of keys and values, which heads may share."""
    net = Sketch(f"{source}; as plain data parallelism, not sharded")
    places = 2048
    net.embedding("words", words, width)
    for layer in range(layers):
        name = f"layer{layer}"
        net.add(f"{name}.norm1", 0, (width,))
        for part, outputs in (("query", width), ("key", keys), ("value", keys)):
            net.linear(f"{name}.{part}", width, outputs, places, bias=biases)
        net.linear(f"{name}.attended", width, width, places, bias=False, extra=2 * places * places * width)
        net.add(f"{name}.norm2", 0, (width,))
        net.linear(f"{name}.gate", width, wide, places, bias=False)
        net.linear(f"{name}.widen", width, wide, places, bias=False)
        net.linear(f"{name}.narrow", wide, width, places, bias=False)
    net.add("norm", 0, (width,))
    net.linear("output", width, words, places, bias=False)
    return net


def transformer_base() -> Sketch:
    net = Sketch(
        "Transformer, base (Vaswani et al. 2017): 37,000 shared sub-words, 32 + 32 tokens; 65 M as published"
    )
    width, places, words = 512, 32, 37000
    net.embedding("words", words, width)
    for side, attentions in (("encoder", ("self",)), ("decoder", ("self", "cross"))):
        for layer in range(6):
            name = f"{side}.layer{layer}"
            for attention in attentions:
                _attention(net, f"{name}.{attention}", width, places)
                net.norm(f"{name}.{attention}.norm", width)
            _perceptron(net, name, width, places)
            net.norm(f"{name}.norm", width)
    net.add("output", words * width * places, (words,))  # the bias; the matrix is the embedding
    return net


def bilstm4() -> Sketch:
    net = Sketch(
        "4 bidirectional LSTM layers of 2 x 512 cells for SWB300 (after Cui, Picheny 2017), 21 frames"
    )
    inputs, cells, frames = 260, 512, 21
    for layer in range(4):
        for direction in ("forward", "backward"):
            macs = 4 * cells * (inputs + cells) * frames
            biases = ((4 * cells,), (4 * cells,))
            net.add(f"layer{layer}.{direction}", macs, (4 * cells, inputs), (4 * cells, cells), *biases)
        inputs = 2 * cells
    net.linear("bottleneck", inputs, 256, frames)
    net.linear("states", 256, 32000, frames)
    return net


def _attention(net: Sketch, name: str, width: int, places: int) -> None:
    """Four projections; the products of queries, keys and values are charged to the output projection."""
    for part in ("query", "key", "value"):
        net.linear(f"{name}.{part}", width, width, places)
    net.linear(f"{name}.attended", width, width, places, extra=2 * places * places * width)


def _perceptron(net: Sketch, name: str, width: int, places: int) -> None:
    net.linear(f"{name}.widen", width, 4 * width, places)
    net.linear(f"{name}.narrow", 4 * width, width, places)
