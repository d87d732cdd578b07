#!/bin/bash
# Targets and drafters as separate torchrun agents that meet in one rendezvous. On every node, or twice on one host:
#   ENDPOINT=first-node:29400 launch/split.sh targets  6 [--config FILE] [section.key=value ...]
#   ENDPOINT=first-node:29400 launch/split.sh drafters 2 [--config FILE] [section.key=value ...]
# The number is that agent's ranks; agents may differ in it. Config and overrides must be the same everywhere.
# With target.stages=S all targets' ranks together are a multiple of S; a chain may span agents.

ENDPOINT=${ENDPOINT:-localhost:29400}  # where the agents meet: a node of the job and a free port on it
AGENTS=${AGENTS:-2}                    # how often this script is started in all
JOB=${JOB:-split}                      # tells two jobs on one endpoint apart
TORCHRUN=${TORCHRUN:-torchrun}
MAX_RESTARTS=${MAX_RESTARTS:-12}

usage() {
    sed -n '2,6s/^# //p' "$0" >&2
    exit 2
}

case ${1:-} in
targets) script=serve_targets.py ;;
drafters) script=train_drafter.py ;;
*) usage ;;
esac
[[ ${2:-} =~ ^[1-9][0-9]*$ ]] || usage
ranks=$2
shift 2

cd "$(dirname "$0")/.." || exit 1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$TORCHRUN" --nnodes "$AGENTS" --nproc_per_node "$ranks" --max-restarts "$MAX_RESTARTS" \
    --rdzv_backend c10d --rdzv_endpoint "$ENDPOINT" --rdzv_id "$JOB" "$script" "$@"
