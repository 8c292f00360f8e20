"""Published times in ms of "Flexible communication …" (Tyagi, Swany 2023), 8 ranks.

Table II: top-k (compression and all-gather) against a dense ring all-reduce. The cell of the ring at 10^9
elements, 10 ms and 10 Gbit/s is lost in the text. Table VI: communication alone, 1 ms; sizes of the gradients
are those of the networks' parameters in float32.
"""

from __future__ import annotations

WORLD = 8

TABLE_II: dict[tuple[float, int, int], tuple[float, float, float | None]] = {
    # (elements, latency ms, Gbit/s): all-gather at 0.1, at 0.001, dense ring
    (1e8, 10, 10): (525, 70, 716),
    (1e8, 10, 5): (976, 74, 1271),
    (1e8, 10, 1): (4568, 111, 5773),
    (1e8, 100, 10): (798, 340, 1975),
    (1e8, 100, 5): (1248, 345, 2530),
    (1e8, 100, 1): (4830, 380, 7028),
    (1e9, 10, 10): (5010, 482, None),
    (1e9, 10, 5): (9507, 534, 11380),
    (1e9, 10, 1): (45355, 898, 56190),
    (1e9, 100, 10): (5280, 745, 7024),
    (1e9, 100, 5): (9805, 791, 12621),
    (1e9, 100, 1): (45645, 1154, 57442),
}

MEGABYTES = {"ResNet18": 46.0, "ResNet50": 102.2, "AlexNet": 244.0, "ViT": 533.0}
RATIOS = (0.1, 0.01, 0.001)

TABLE_VI: dict[tuple[str, int], tuple[tuple[float, float, float], ...]] = {
    # (network, Gbit/s): for each ratio all-gather, AR-Topk by ring, by tree
    ("ResNet18", 10): ((54, 35, 43.2), (7.66, 18.1, 12.2), (3.28, 16.7, 9)),
    ("ResNet18", 5): ((107.76, 52.5, 76.3), (13.83, 20.8, 16.1), (4.25, 17.9, 10.1)),
    ("ResNet18", 1): ((526.3, 194.7, 345.6), (51.93, 34.1, 41.9), (8.86, 19.5, 12.8)),
    ("ResNet50", 10): ((115.1, 52.9, 83.4), (14.35, 20.3, 15.9), (4.65, 18.1, 10)),
    ("ResNet50", 5): ((232, 94.7, 156.2), (28.1, 26.1, 24.2), (5.3, 17.8, 10.5)),
    ("ResNet50", 1): ((1148, 405.5, 745), (126.5, 58.8, 83.7), (14.35, 21, 16.1)),
    ("AlexNet", 10): ((271.8, 106.8, 180.4), (32.73, 25.2, 25.8), (6, 18.6, 11.1)),
    ("AlexNet", 5): ((544.5, 200.4, 354.8), (61.75, 34.8, 42.6), (8.92, 19.3, 13.1)),
    ("AlexNet", 1): ((2718.7, 964.4, 1778), (282.7, 111.8, 186.8), (31.33, 27, 27.3)),
    ("ViT", 10): ((592.77, 238.6, 401.2), (68.48, 36.2, 46.2), (9.15, 19.2, 12.9)),
    ("ViT", 5): ((1206, 424.3, 779.1), (127.45, 58, 86.2), (15.3, 21.4, 16.9)),
    ("ViT", 1): ((5973, 2047, 3852), (601.8, 222.8, 385.2), (59.68, 36.7, 44.4)),
}
