#!/bin/bash
# Submit with: sbatch slurm.sh run.yaml [OPTIONS]
#SBATCH --job-name=megatron-run
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail

# A folder that every node mounts; the job's number keeps runs apart, and is the same when the job is requeued: it then
# goes on from the newest saved step.
RUN_FOLDER=${RUN_FOLDER:-$SLURM_SUBMIT_DIR/runs/$SLURM_JOB_ID}

# srun sets the rank, the number of ranks and the hosts; megatron-run reads them. Without --kill-on-bad-exit the other
# tasks of a failed run would wait for run.timeout.
srun --kill-on-bad-exit=1 megatron-run "$@" --set "run.folder=$RUN_FOLDER"
