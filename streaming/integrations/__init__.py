"""Adapt loaders to trainers that count, save or shard data themselves. ``import streaming`` imports none of these.

``streaming.integrations.accelerate`` and ``streaming.integrations.transformers`` import the libraries of those names;
``streaming.integrations.lightning`` is for loaders without a length; ``streaming.integrations.torchtitan`` and
``streaming.integrations.olmo_core`` have loaders of TorchTitan and OLMo-core, ``streaming.integrations.trl`` prompts of
TRL's asynchronous GRPO. Fabric, and others that ask for torch's class, take ``streaming.as_torch(loader)``. Ray Train,
torch.distributed and its checkpoints need no adapter: see docs/trainers.md. ``streaming.integrations.gpu_decoders``
passes images to GPU decoders.
"""
