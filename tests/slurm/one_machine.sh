#!/bin/bash
# A one-machine Slurm from Debian's packages, as root on a machine that may be thrown away:
#   tests/slurm/one_machine.sh start | stop
# Everything lives under $SLURM_HOME; `export SLURM_CONF=$SLURM_HOME/slurm.conf` before sbatch, squeue, scontrol.
set -eu
SLURM_HOME=${SLURM_HOME:-/tmp/one_machine_slurm}
export SLURM_CONF=$SLURM_HOME/slurm.conf

start() {
    command -v slurmctld >/dev/null && command -v munged >/dev/null || apt-get install -y slurm-wlm munge
    mkdir -p "$SLURM_HOME"/{state,spool,run} /run/munge
    node=$(hostname -s)
    cat >"$SLURM_CONF" <<CONF
ClusterName=one
SlurmctldHost=$node(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
StateSaveLocation=$SLURM_HOME/state
SlurmdSpoolDir=$SLURM_HOME/spool
SlurmctldPidFile=$SLURM_HOME/run/slurmctld.pid
SlurmdPidFile=$SLURM_HOME/run/slurmd.pid
SlurmctldLogFile=$SLURM_HOME/slurmctld.log
SlurmdLogFile=$SLURM_HOME/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
SchedulerParameters=batch_sched_delay=0
MinJobAge=3600
NodeName=$node NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=$node Default=YES MaxTime=INFINITE State=UP
CONF
    chown munge: /run/munge
    pgrep -x munged >/dev/null || runuser -u munge -- munged
    slurmctld -c
    slurmd
    for _ in $(seq 60); do
        sinfo -h -o %T 2>/dev/null | grep -q idle && return
        sleep 0.5
    done
    echo "the node does not become idle; see $SLURM_HOME/*.log" >&2
    exit 1
}

stop() {
    for daemon in slurmd slurmctld; do
        if [ -f "$SLURM_HOME/run/$daemon.pid" ]; then kill "$(cat "$SLURM_HOME/run/$daemon.pid")" || true; fi
    done
}

case ${1:-} in
start | stop) "$1" ;;
*) sed -n '2,4s/^# //p' "$0" >&2 && exit 2 ;;
esac
