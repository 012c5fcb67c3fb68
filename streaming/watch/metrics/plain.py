"""Make plain dicts of a loader's numbers, for any library that takes names and floats."""

from __future__ import annotations

from streaming.watch.metrics.exported import Observed, check_observed, observe
from streaming.watch.metrics.waits import waits


def flat(loader: Observed, prefix: str = "loader/") -> dict[str, float]:
    """Return a loader's numbers as a flat dict of floats, for TensorBoard, Weights & Biases and others.

    ::

        wandb.log(streaming.metrics.flat(loader), step=step)
        for name, value in streaming.metrics.flat(loader).items():
            writer.add_scalar(name, value, step)

    Names are those of ``loader.metrics()``, preceded by ``prefix``. ``epoch``, ``samples_seen`` and ``headspace``, the
    share of the step spent inside the loader (see docs/metrics.md), are added. Numbers of remote readers are named
    ``readers/{data_rank}/…``. No extra is needed.

    Raises:
        ConfigError: ``loader`` is not one of ours.
    """
    check_observed(loader, "flat")
    found = observe(loader)
    named = {name: float(value) for name, value in found.numbers.items()}
    named |= {"epoch": float(found.epoch), "samples_seen": float(found.samples_seen)}
    named["headspace"] = waits(found.numbers).share
    for data_rank, numbers in found.readers.items():
        named |= {f"readers/{data_rank}/{name}": float(value) for name, value in numbers.items()}
    return {f"{prefix}{name}": value for name, value in named.items()}
