"""A decoder-only transformer over characters (Vaswani et al. 2017; pre-norm as in Radford et al. 2019)."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class Layer(nn.Module):
    """Causal self-attention and a two-layer perceptron, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(n, length, width) -> the same shape."""
        n, length, width = x.shape
        joined = self.query_key_value(self.norm1(x)).view(n, length, 3, self.heads, width // self.heads)
        query, key, value = joined.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(seen.transpose(1, 2).reshape(n, length, width))
        out: Tensor = x + self.narrow(functional.gelu(self.widen(self.norm2(x))))
        return out


class CharGPT(nn.Module):
    """Predicts the next character at every position; the output layer is the embedding, transposed."""

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, length: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # what is added to the residual stream 2·depth times starts smaller by the root of that
                onto_stream = name.endswith(("attended.weight", "narrow.weight"))
                std = 1 / math.sqrt(2 * depth * width if onto_stream else width)
                nn.init.normal_(parameter, std=std)

    def forward(self, codes: Tensor) -> Tensor:
        """(n, length) character codes -> (n, length, vocabulary) logits."""
        position = torch.arange(codes.shape[1], device=codes.device)
        x = self.layers(self.characters(codes) + self.positions(position))
        return functional.linear(self.norm(x), self.characters.weight)
