#!/usr/bin/env bash
# Starts all roles of one of several equal nodes, and restarts them when they die. The first GPUs train, starting with
# node 0; the others generate. skypilot.yaml runs this script on each node. Elsewhere run it yourself:
#   export AREAL_KEYS=keys        # made once by `python -m areal keys keys`; a copy on every node
#   NODE=0 NODES=2 HEAD=10.0.0.1 bash configs/deploy/node.sh         # on node 0; with NODE=1 on the other
# HEAD is the address at which all nodes reach node 0. On node 0 itself it must not resolve to a loopback address.
set -u
cd "$(dirname "$0")/../.." || exit
PATH=$PWD/.venv/bin:$PATH
NODE=${NODE:?set NODE to the number of this node, from 0}
: "${NODES:?set NODES to the number of nodes}" "${HEAD:?set HEAD to the address of node 0}"
RUN=${RUN:-runs/deploy}
CONFIG=${CONFIG:-configs/deploy/run.yaml}
GPUS=${GPUS:-8}                        # per node
TRAINING_GPUS=${TRAINING_GPUS:-4}      # over all nodes; `python -m areal plan` computes it
TENSOR_PARALLEL=${TENSOR_PARALLEL:-2}  # GPUs per generator
SCORERS=${SCORERS:-}                   # names of scorers of this node, TENSOR_PARALLEL GPUs each, before the generators
WEIGHTS=${WEIGHTS:-folder}             # stream: if the nodes share no file system
MASTER=tcp://$HEAD:5555
resume=()

if ((TRAINING_GPUS > GPUS && TRAINING_GPUS % GPUS)); then
  echo "TRAINING_GPUS is $TRAINING_GPUS: use at most the $GPUS of one node, or whole nodes." >&2
  exit 2
fi

# keep FINAL COMMAND...: restarts the command when it ends, unless its exit code is one of FINAL or this script is gone
keep() {
  local final=$1 child code parent
  shift
  trap 'kill "$child" 2>/dev/null; wait "$child"; exit 1' TERM
  while true; do
    "$@" &
    child=$!
    wait "$child"
    code=$?
    [[ " $final " == *" $code "* ]] && return "$code"
    sleep 5
    read -r _ _ _ parent _ <"/proc/$BASHPID/stat"
    ((parent == $$)) || return 1
  done
}

# A role is not restarted if its master does not come back.
# shellcheck disable=SC2317,SC2329 # called by keep
role() {
  trap 'kill $!; exit 1' TERM
  python -m areal health --master "$MASTER" --wait 600 >/dev/null &
  wait $! || exit 2
  exec "$@" --master "$MASTER"
}

devices() { seq -s , "$1" $(($1 + $2 - 1)); } # FIRST COUNT

trap 'kill $(jobs -p) 2>/dev/null; wait; exit 1' TERM
if ((NODE == 0)); then
  [ -e "$RUN/journal.db" ] && resume=(--resume "$RUN")
  keep "0 1 2" python run.py --role master "${resume[@]}" --config "$CONFIG" "master.address=$MASTER" \
    "run_dir=$(dirname "$RUN")" "name=$(basename "$RUN")" \
    "generator.tensor_parallel=$TENSOR_PARALLEL" "weights.transport=$WEIGHTS" &
  master=$!
fi

left=$((TRAINING_GPUS - NODE * GPUS))
training=$((left < 0 ? 0 : left < GPUS ? left : GPUS))
if ((training)); then
  CUDA_VISIBLE_DEVICES=$(devices 0 $training) keep "0 2" role torchrun --nnodes $(((TRAINING_GPUS + GPUS - 1) / GPUS)) \
    --nproc-per-node $training --rdzv-backend c10d --rdzv-endpoint "$HEAD:29400" -- run.py --role trainer &
fi
first=$training
for name in $SCORERS; do
  CUDA_VISIBLE_DEVICES=$(devices $first "$TENSOR_PARALLEL") keep "0 2" role python run.py --role scorer --scorer "$name" &
  ((first += TENSOR_PARALLEL))
done
for ((; first + TENSOR_PARALLEL <= GPUS; first += TENSOR_PARALLEL)); do
  CUDA_VISIBLE_DEVICES=$(devices $first "$TENSOR_PARALLEL") keep "0 2" role python run.py --role generator &
done
others=(--role rollout_manager --role reward)
((NODE == 0)) && others+=(--role evaluator)
CUDA_VISIBLE_DEVICES='' keep "0 2" role python run.py "${others[@]}" &

if ((NODE == 0)); then
  wait "$master"
  code=$?
  # shellcheck disable=SC2046 # one word per job
  ((code)) && kill $(jobs -p)
fi
wait
exit "${code:-0}"
