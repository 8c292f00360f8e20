"""GComp's codec: exponents by Huffman code, mantissas cut where it makes no difference, in one checked frame.

Li et al., "Near-Lossless Gradient Compression for Data-Parallel Distributed DNN Training" (SoCC 2024),
sections 4 to 6. `docs/engineering/wire-format.md` is the format, which `tests/golden/slow.py` reads in plain
Python.

Stage by stage, each callable alone: `symbols_of` (split), `histogram`, `code_lengths` (package-merge),
`canonical_codes`, `encode_symbols`, `decode_symbols`, `rounded` (levels), `frame`, `unframe`.

Differences from the paper:

- Codes are length-limited by package-merge, and a symbol below a share of 2^-n_theta / 5.5 is escaped; the
  paper builds a Huffman code and cuts it where it gets too long.
- The raw exponents of escapes are a segment of their own, so that neither direction branches on them.
- Every chunk's codes are four streams, and a decoder's look-up gives all codes within its window.
- Numbers below the normal range have a symbol of their own, if they are not flushed.
- Mantissas are rounded to nearest. The paper truncates, which is biased.
- Beside the levels 0/6/12/18 that travel in 2 bits each there are thresholds that do not travel, as fine as a
  bit and down to zero, which the receiver computes from what all replicas hold.
- A checksum, and what step, unit and hop a frame belongs to, so that no rank decodes what was not meant.
"""

from gradwire.codec.gcomp.frame import CHUNK, Key, frame, largest_frame, unframe
from gradwire.codec.gcomp.rounding import histogram, rounded, symbols_of
from gradwire.codec.gcomp.table import (
    N_THETA,
    CodeTable,
    begin_table,
    code_lengths,
    fingerprint,
    package_merge,
    table_of,
)
from gradwire.kernels.huffman import SYMBOLS, canonical_codes, decode_symbols, encode_symbols

__all__ = [
    "CHUNK",
    "N_THETA",
    "SYMBOLS",
    "CodeTable",
    "Key",
    "begin_table",
    "canonical_codes",
    "code_lengths",
    "decode_symbols",
    "encode_symbols",
    "fingerprint",
    "frame",
    "histogram",
    "largest_frame",
    "package_merge",
    "rounded",
    "symbols_of",
    "table_of",
    "unframe",
]
