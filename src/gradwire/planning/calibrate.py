"""The bandwidth that whole gradients found, where small probes could not."""

from __future__ import annotations

from dataclasses import replace

from gradwire.planning.collectives import algorithm_of
from gradwire.planning.costs import Link, Network


def calibrated(
    network: Network, dense_s: float, payload_bytes: float, collectives: int, world: int
) -> Network:
    """`network` with no link faster per byte than a dense gradient found it to be.

    That took `dense_s`, in so many `collectives` of `payload_bytes` together. Probes keep within a part of a
    step: on a slow link they are short enough to go through a shaper's burst or a switch's buffer, and find
    any bandwidth. Latencies stay as probed, for which small messages are right.

    >>> probed = Network(Link(alpha_s=1e-3, beta_s=0.0))
    >>> calibrated(probed, dense_s=1.512, payload_bytes=1e8, collectives=2, world=4).link
    Link(alpha_s=0.001, beta_s=1e-08)
    """
    ring = algorithm_of("all_reduce")
    sending_s = dense_s - collectives * ring.messages(world) * network.of("all_reduce").alpha_s
    if not sending_s > 0.0 or not payload_bytes > 0.0:
        return network
    beta_s = sending_s / (ring.volume(world) * payload_bytes)

    def no_faster(link: Link) -> Link:
        return replace(link, beta_s=max(link.beta_s, beta_s))

    links = {verb: no_faster(link) for verb, link in network.calibrated.items()}
    return Network(no_faster(network.link), links)
