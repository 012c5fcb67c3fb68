"""Adapt loaders to trainers that count, save or shard data themselves. ``import streaming`` imports none of these.

``streaming.integrations.accelerate`` and ``streaming.integrations.transformers`` import the libraries of those names;
``streaming.integrations.lightning`` is for loaders without a length; ``streaming.integrations.torchtitan`` has a loader
of TorchTitan. Fabric, and others that ask for torch's class, take ``streaming.as_torch(loader)``. Ray Train,
torch.distributed and its checkpoints need no adapter: see docs/trainers.md. ``streaming.integrations.gpu_decoders``
passes images to GPU decoders.
"""
