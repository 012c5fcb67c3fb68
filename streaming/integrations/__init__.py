"""Fit trainers that count, save or cut data by themselves. ``import streaming`` imports none of it.

``streaming.integrations.accelerate`` and ``streaming.integrations.transformers`` import the libraries of these names;
``streaming.integrations.lightning`` is for loaders without a length. Ray Train, torch.distributed and its checkpoints
need none: see docs/trainers.md. ``streaming.integrations.gpu_decoders`` hands images to decoders on a GPU.
"""
