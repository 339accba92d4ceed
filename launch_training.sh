#!/usr/bin/env bash
# Train image classifiers, or a GPT, on one node or several; a thin layer over torchrun.
#
#   ./launch_training.sh --config FILE [--field value …]     one rank per GPU, else two on the CPU
#   ./launch_training.sh NPROC STRATEGY BATCH [--field value …]
#   ./launch_training.sh … --dry-run                         print the plan, train nothing
#
# Several nodes: run it on each of them with
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500    (NODE_RANK=1 on the second …)
# NNODES=1:4 lets nodes come and go. Also read: NPROC_PER_NODE, MAX_RESTARTS (3), RUN_ID, and
# LAUNCH_PYTHON (.venv/bin/python where there is one).
# BATCH is the global batch, over all ranks. After SIGTERM (or SIGINT) all ranks save, then they
# leave; a second one ends them at once. Killed (SIGKILL), it takes its ranks along.
#
# Exit status: 0 done, 78 refused (it can't run like this: don't try again), 75 saved after a signal
# (start it again), 70 hung and ended by the watchdog, anything else a crash.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
refused=78 preempted=75 # solutions/phase4_production/exit_codes.py
trap 'echo "launch_training: told to leave before training began" >&2; exit $preempted' TERM INT USR1

python=${LAUNCH_PYTHON:-python}
if [ -z "${LAUNCH_PYTHON:-}" ] && [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
usage() { sed -n -e '/^set/q' -e '2,$s/^# \{0,1\}//p' launch_training.sh; }
if [ $# -eq 0 ]; then
    usage >&2
    exit $refused
fi
for word in "$@"; do
    case $word in
    -h | --help)
        usage
        echo "Fields: $python -m solutions.phase4_production.imagenet_trainer --help"
        exit 0
        ;;
    esac
done

if [[ "$1" =~ ^[0-9]+$ ]]; then
    if [ $# -lt 3 ]; then
        echo "launch_training: usage: ./launch_training.sh NPROC STRATEGY BATCH" >&2
        exit $refused
    fi
    export NPROC_PER_NODE=$1
    set -- --config "${CONFIG:-configs/digits.yaml}" --strategy "$2" --global-batch "$3" "${@:4}"
fi

gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
nproc=${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 2))}
nnodes=${NNODES:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
trainer=solutions.phase4_production.imagenet_trainer

"$python" -m solutions.phase4_production.preflight "$@"
for word in "$@"; do
    if [ "$word" = --dry-run ]; then
        export WORLD_SIZE=$((${nnodes#*:} * nproc)) LOCAL_WORLD_SIZE=$nproc
        exec "$python" -m "$trainer" "$@"
    fi
done

if [ "$nnodes" = 1 ] && [ -z "${MASTER_PORT:-}" ]; then
    rendezvous=(--standalone)
else
    # nodes come and go: one that comes later would wait for an address that is not written again
    case $nnodes in *:*) export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 ;; esac
    rendezvous=(--nnodes "$nnodes" --rdzv-backend c10d --rdzv-id "${RUN_ID:-trainer}"
        --rdzv-endpoint "${MASTER_ADDR:-127.0.0.1}:${MASTER_PORT:-29500}")
    if [ -n "${NODE_RANK:-}" ]; then
        rendezvous+=(--rdzv-conf "is_host=$([ "$NODE_RANK" = 0 ] && echo true || echo false)")
    fi
fi
exec "$python" -m solutions.phase4_production.agent "${rendezvous[@]}" --nproc-per-node "$nproc" \
    --max-restarts "${MAX_RESTARTS:-3}" -m -- "$trainer" "$@" # --: its options are not torchrun's
