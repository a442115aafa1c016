#!/bin/bash
# The program of multi_process.py on two hosts of eight GPUs each, by Slurm:
#
#     sbatch examples/slurm.sh
#
#SBATCH --job-name jax-ep
#SBATCH --nodes 2
#SBATCH --ntasks-per-node 8
#SBATCH --gpus-per-node 8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode append

export PYTHONUNBUFFERED=1                   # the last lines of a process that is killed are not lost
export JAX_ENABLE_PREEMPTION_SERVICE=false  # processes end as soon as Slurm asks them to

# If a process fails, no other one can go on without it. All are then ended and started again, up to three times.
# --label puts the number of the process before each of its lines.
srun --kill-on-bad-exit=1 --label python examples/multi_process.py && exit
status=$?
((${SLURM_RESTART_COUNT:-0} < 3)) && scontrol requeue "$SLURM_JOB_ID"
exit "$status"
