#!/bin/bash
# The same command on every node. The job runs on 2 to 4 nodes and starts anew, from the last checkpoint, whenever
# one comes or goes. A checkpoint holds loader.state_dict(): it is valid on any number of nodes.
#   RENDEZVOUS=node0:29400 RUN_ID=run7 ./elastic.sh
# batch sizes: give the loader global_batch_size, so that a global batch stays the same on fewer nodes.

set -euo pipefail

# torch 2.13: without this, nodes that join a running job wait in vain for the address of their round.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun \
  --nnodes=2:4 \
  --nproc-per-node="${GPUS_PER_NODE:-8}" \
  --max-restarts=10 \
  --rdzv-backend=c10d \
  --rdzv-endpoint="${RENDEZVOUS:?host:port of one node}" \
  --rdzv-id="${RUN_ID:?one name per run}" \
  train.py --data "s3://BUCKET/train/" --resume "$@"
