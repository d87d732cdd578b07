#!/bin/bash
# Two jobs through launch/slurm.sbatch on the one-machine Slurm: one runs to its end, one is signalled half-way, queues itself again
# and finishes. Their weights must be equal bit by bit. Arguments go to both, e.g. --config FILE; default: the quickstart.
set -eu
cd "$(dirname "$0")/../.."
tests/slurm/one_machine.sh start
export SLURM_CONF=${SLURM_HOME:-/tmp/one_machine_slurm}/slurm.conf
work=$(mktemp -d)
export RANKS_PER_NODE=3 TORCHRUN=${TORCHRUN:-torchrun}
settings=("$@" optim.steps=60 checkpoint.every=20 sync.every=10 validation.every=60)

submit() { # name -> job id
    RUN=$work/$1 sbatch --parsable --job-name "$1" --nodes=1 --gpus-per-node=0 --output "$work/$1.out" launch/slurm.sbatch "${settings[@]}"
}

state_of() { scontrol show job "$1" | grep -o 'JobState=[A-Z]*' | cut -d= -f2; }

wait_for() { # what, command...
    local what=$1
    shift
    for _ in $(seq 1200); do
        "$@" && return
        sleep 0.5
    done
    echo "gave up waiting: $what; logs in $work" >&2
    exit 1
}

ended() { case $(state_of "$1") in COMPLETED) true ;; PENDING | RUNNING | COMPLETING | REQUEUED) false ;; *) echo "job $1: $(state_of "$1")" >&2 && tail -n 40 "$work"/*.out >&2 && exit 1 ;; esac }
restarts() { scontrol show job "$1" | grep -o 'Restarts=[0-9]*' | cut -d= -f2; }
requeued() { [ "$(restarts "$1")" -ge 1 ]; }
has_checkpoint() { compgen -G "$work/stopped/checkpoints/step_*" >/dev/null; }

straight=$(submit straight)
wait_for "the straight job to end" ended "$straight"
stopped=$(submit stopped)
wait_for "a checkpoint" has_checkpoint
scancel --batch --signal=USR1 "$stopped"
wait_for "the job to queue itself again" requeued "$stopped"
wait_for "the requeued job to end" ended "$stopped"

cmp "$work"/{straight,stopped}/checkpoints/step_00000060/drafter.safetensors
cmp "$work"/{straight,stopped}/export/latest/model.safetensors
echo "equal weights after $(restarts "$stopped") requeue; checkpoints of the stopped job:" "$(ls "$work/stopped/checkpoints")"
tests/slurm/one_machine.sh stop
