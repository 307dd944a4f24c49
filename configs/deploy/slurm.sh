#!/usr/bin/env bash
# sbatch configs/deploy/slurm.sh, in the folder of the repository, which all nodes have to see. The run goes on where it
# stood when the job is submitted again, or requeued. Change what is marked.
#SBATCH --job-name=areal
#SBATCH --nodes=2            # change
#SBATCH --gpus-per-node=8    # change; --gres=gpu:8 where that is the custom
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
# The name has to be the address that the nodes talk over, InfiniBand's for instance: change where it is not.
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
RUN=${RUN:-runs/deploy}
CONFIG=${CONFIG:-configs/deploy/run.yaml} # change, or copy and edit that file
GPUS=8                                    # change; of a node
TRAINING_GPUS=4                           # change; of all nodes: the other 12 generate
TENSOR_PARALLEL=2                         # change; GPUs of one generator
AREAL_KEYS=${AREAL_KEYS:-$RUN-keys}
export NODES HEAD RUN CONFIG GPUS TRAINING_GPUS TENSOR_PARALLEL AREAL_KEYS
[ -e "$AREAL_KEYS" ] || .venv/bin/python -m areal keys "$AREAL_KEYS"
srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 --label bash configs/deploy/node.sh
