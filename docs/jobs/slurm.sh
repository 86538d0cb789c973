#!/bin/bash
# Submit with: sbatch slurm.sh run.yaml [OPTIONS]
#SBATCH --job-name=megatron-run
#SBATCH --nodes=1-2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

# The environment in which megatron-run is installed, the same on every node: a virtual one, or `module load ...`.
ENVIRONMENT=${ENVIRONMENT:-$SLURM_SUBMIT_DIR/.venv}
source "$ENVIRONMENT/bin/activate"

# A folder that every node mounts; the job's number keeps runs apart, and is the same when the job is requeued: it then
# goes on from the newest saved step.
RUN_FOLDER=${RUN_FOLDER:-$SLURM_SUBMIT_DIR/runs/$SLURM_JOB_ID}

# A requeued job may get fewer nodes, and trains on those: run.elastic. TERM comes 120 s before the time limit.
ELASTIC=(--set run.elastic=data --set run.stop_within=110)

# srun sets the rank, the number of ranks and the hosts; megatron-run reads them. It does not take --cpus-per-task from
# the job. Without --kill-on-bad-exit the other tasks of a failed run would wait for run.timeout.
code=0
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 megatron-run "$@" "${ELASTIC[@]}" --set "run.folder=$RUN_FOLDER" || code=$?

# The hosts of ranks that guard.exclude has named, as Slurm knows them; none without the record, or without any.
excluded=$(python3 -c 'import json, sys
print(",".join(sorted({rank["host"].partition(".")[0] for rank in json.load(open(sys.argv[1]))["ranks"]})))' \
    "$RUN_FOLDER/excluded.json" 2>/dev/null) || excluded=

# Before the time limit Slurm sends TERM, and the ranks save: 143. A time limit of the run's own ends with 75, a lost
# rank with 4. Slurm requeues by itself after the failure of a node alone, so these ask for it. Only a job that waits may
# leave out hosts, and Slurm ends this script by TERM once its job does.
case $code in
4 | 75 | 143)
    if [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; then
        trap '' TERM
        scontrol requeue "$SLURM_JOB_ID"
        if [ -n "$excluded" ]; then
            # What is set takes the place of the job's own --exclude, which is kept so.
            own=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/.*ExcNodeList=\([^( ][^ ]*\).*/\1,/p') || own=
            scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$own$excluded" || true
        fi
    fi
    ;;
esac
exit "$code"
