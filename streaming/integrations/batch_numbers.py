"""Convert a loader's position to a number of batches in its epoch, as trainers count, and back."""

from __future__ import annotations

from dataclasses import replace

from streaming.errors import ConfigError
from streaming.loader import DataLoader

__all__ = ["batches_seen", "begin_at"]


def batches_seen(loader: DataLoader) -> int:
    """Return the number of batches of the current epoch before the loader's position."""
    loop = loader._loop
    place = loop.position.place
    if loop.is_counted and (place.is_end or loader.has_ramp or loader.micro_batch_size is not None):
        return loader._num_batches() - loader.batches_left
    return -(-place.samples_seen // loader.global_batch_size)


def begin_at(loader: DataLoader, number: int) -> int:
    """Make the loader's next iteration begin at a batch of its epoch, counted from 0, without reading earlier ones.

    Returns:
        The number of batches that the iteration must still drop: 0, or ``number`` if only reading can find the start of
        a batch (an iterable dataset, batches whose size changes, readers in actors, or a new seed).

    Raises:
        ConfigError: The epoch has fewer batches, or a state was loaded that continues at another batch.
    """
    loop = loader._core.now(to_read=True)
    if loop.is_counted and number > (most := loader._num_batches()):
        raise ConfigError(
            f"skip_first_batches: got {number} batches, but an epoch of this loader has {most} on each rank; "
            "count the batches of one rank in one epoch"
        )
    place = loop.position.upcoming
    if place.is_end and not number:  # a loaded state: the trainer counts from the epoch after it
        loader.set_epoch(place.epoch + 1)
        return 0
    if place.samples_seen or place.micro_batches:
        here = batches_seen(loader)
        if here != number:
            raise ConfigError(
                f"skip_first_batches: the loader already continues at batch {here} of epoch {place.epoch}, from the "
                f"state that was loaded, and not at batch {number}: resume with the global batch size and accumulation "
                "of the run that saved it; or load no state"
            )
        return 0
    can_seek = loop.can_seek and not loader.has_ramp and loop.position.next_seed is None
    if not number or not can_seek:
        return number
    step, part = divmod(number, loop.shape.num_parts(loader.global_batch_size))
    there = loop.settled(replace(place, samples_seen=step * loader.global_batch_size))
    for _ in range(part):
        there = there.after_micro_batch()
    loader.load_state_dict(loop.state_at(there).to_dict())
    return 0
