"""The file of each contract and of its implementations. A file is imported on first use.

All kernels together are some 40 modules, of which a recipe needs a few.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

CONTRACTS = {
    "blocks": (
        "add_blocks",
        "decode_blocks",
        "encode_blocks",
        "reduce_blocks",
    ),
    "chosen": (
        "add_chosen",
        "pack_elias_fano",
        "take_chosen",
        "unpack_elias_fano",
    ),
    "chunks": (
        "chunk_topk_indices",
        "indices_near_maxima",
    ),
    "draws": (
        "random_words",
        "sample_indices",
        "stratified_indices",
    ),
    "flagged": (
        "poison",
        "zero_idle",
    ),
    "folding": (
        "fold",
        "fold_momentum",
        "mask_zeros",
    ),
    "levels": (
        "add_levels",
        "encode_levels",
    ),
    "low_rank": (
        "left_products",
        "orthonormalise",
        "outer_products",
        "right_products",
    ),
    "magnitudes": ("magnitude_histogram",),
    "terms": (
        "mantissa_levels",
        "numerator_exponents",
        "numerators",
    ),
    "places": (
        "add_at",
        "pack_bits",
        "put",
        "scatter",
        "take",
        "unpack_bits",
    ),
    "signs": (
        "add_signs",
        "feedback_signs",
        "pack_signs",
    ),
    "sketches": (
        "count_sketch",
        "count_sketch_estimates",
    ),
    "stochastic": (
        "add_quantized",
        "quantize",
    ),
    "threshold": (
        "indices_reaching",
        "moments_reaching",
    ),
    "topk": (
        "feedback_topk",
        "take_topk",
        "topk_indices",
    ),
    "truncation": (
        "add_upper",
        "pack_upper",
    ),
    "votes": (
        "apply_votes",
        "cast_votes",
        "tally",
    ),
}
"""By the file that holds the contracts in `reference/`, and implementations in `cpu/` and `device/`."""

SUBJECTS = {name: subject for subject, names in CONTRACTS.items() for name in names}
"""By the name of a contract."""


def on_first_use(folder: str) -> Callable[[str], Any]:
    """`__getattr__` of a folder of kernels: functions by the names of contracts, and modules.

    >>> on_first_use("gradwire.kernels.cpu")("take").__module__
    'gradwire.kernels.cpu.places'
    """

    def found(name: str) -> Any:
        home = f"{folder}.{SUBJECTS.get(name, name)}"
        if not name.startswith("_") and find_spec(home) is not None:
            module = import_module(home)
            if name not in SUBJECTS:
                return module
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"module {folder!r} has no attribute {name!r}")

    return found
