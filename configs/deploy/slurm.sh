#!/usr/bin/env bash
# sbatch configs/deploy/slurm.sh, in the repository folder, which all nodes have to share. If the job is submitted again
# or requeued, the run resumes where it stopped. Change the lines marked "change".
#SBATCH --job-name=areal
#SBATCH --nodes=2            # change
#SBATCH --gpus-per-node=8    # change; --gres=gpu:8 on clusters that use that form
#SBATCH --time=24:00:00      # change
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --signal=TERM@60
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
set -eu
NODES=$SLURM_NNODES
# This name has to resolve to the interface that the nodes use for their traffic, such as InfiniBand. Change it if not.
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
RUN=${RUN:-runs/deploy}
CONFIG=${CONFIG:-configs/deploy/run.yaml} # change this, or copy and edit the file
GPUS=${GPUS:-$SLURM_GPUS_ON_NODE}         # per node
TRAINING_GPUS=${TRAINING_GPUS:-4}         # change; over all nodes: the other 12 generate
TENSOR_PARALLEL=${TENSOR_PARALLEL:-2}     # change; GPUs per generator
AREAL_KEYS=${AREAL_KEYS:-$RUN-keys}
export NODES HEAD RUN CONFIG GPUS TRAINING_GPUS TENSOR_PARALLEL AREAL_KEYS
[ -e "$AREAL_KEYS" ] || .venv/bin/python -m areal keys "$AREAL_KEYS"
code=0
srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 --label bash configs/deploy/node.sh || code=$?
# Slurm requeues a job whose node is lost, but not one whose processes were killed on a node that is still up.
if ((code > 128 && ${SLURM_RESTART_COUNT:-0} < 20)); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
