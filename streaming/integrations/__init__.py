"""Glue for trainers that count, save or cut data by themselves. ``import streaming`` imports none of it.

``streaming.integrations.accelerate`` and ``streaming.integrations.transformers`` each import the library of that name.
Lightning, Ray Train, torch.distributed and its checkpoints need none: see docs/trainers.md.
"""
