#!/usr/bin/env bash
# Profile on several hosts under Slurm: a torchrun a host, a rank a GPU.
#
#   sbatch --nodes 2 --gpus-per-node 4 scripts/profile_slurm.sh --workload moonlight-16b --ep 4 --variant fused
#
# Every option is profile_step.py's; --ranks is set here. The working folder, with .venv in it, has to be the same on all
# hosts. RANKS_PER_NODE: ranks on each host (default 4); PYTHON: what to run them with; PORT: of the rendezvous.
#SBATCH --job-name=distmuon-profile
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:30:00
set -euo pipefail

ranks_per_node=${RANKS_PER_NODE:-4}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first_host=${hosts%%$'\n'*}

# One rank that fails ends its launcher, and with it every other.
srun --kill-on-bad-exit=1 "${PYTHON:-.venv/bin/python}" -m torch.distributed.run \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$ranks_per_node" \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first_host:${PORT:-29500}" \
    scripts/profile_step.py --ranks $((SLURM_JOB_NUM_NODES * ranks_per_node)) "$@"
