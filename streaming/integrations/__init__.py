"""Adapt loaders to trainers that count, save or shard data themselves. ``import streaming`` imports none of these.

``streaming.integrations.accelerate`` and ``streaming.integrations.transformers`` import the libraries of those names;
``streaming.integrations.lightning`` is for Fabric, and for loaders without a length. Ray Train, torch.distributed and
its checkpoints need no adapter: see docs/trainers.md. ``streaming.integrations.gpu_decoders`` passes images to GPU
decoders.
"""
