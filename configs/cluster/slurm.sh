#!/usr/bin/env bash
# sbatch configs/cluster/slurm.sh method=pfedcfr clients=100 ...      one run on nodes of a Slurm cluster; docs/cluster.md
#SBATCH --job-name=pflsim
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --exclusive
#SBATCH --time=04:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --no-kill
# --signal: the run saves its state two minutes before the time limit; resume it with resume=FOLDER.
# --no-kill: if a node fails, the run goes on if the others have room, or else saves its state. For GPUs add --gres=gpu:2 and placement.gpus=...
set -euo pipefail

folder=${PFLSIM:-$SLURM_SUBMIT_DIR}              # this project, on storage that all nodes share
. "${PFLSIM_VENV:-$folder/.venv}/bin/activate"   # its environment, also shared
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address=$(srun --nodes=1 --ntasks=1 --nodelist="${hosts[0]}" hostname --ip-address | awk '{ print $1 }')
port=$((20000 + SLURM_JOB_ID % 10000))
start=(ray start --block --num-cpus="$SLURM_CPUS_PER_TASK" --disable-usage-stats)

# Start Ray on the first node, then on the others; it runs until the job ends.
srun --overlap --nodes=1 --ntasks=1 --nodelist="${hosts[0]}" \
  "${start[@]}" --head --node-ip-address="$address" --port="$port" &
for host in "${hosts[@]:1}"; do
  srun --overlap --nodes=1 --ntasks=1 --nodelist="$host" "${start[@]}" --address="$address:$port" &
done

# Start the run on the first node; it waits for the others.
srun --overlap --nodes=1 --ntasks=1 --nodelist="${hosts[0]}" \
  python "$folder/launch.py" ray_address="$address:$port" placement.nodes="$SLURM_JOB_NUM_NODES" placement.wait_s=120 progress=plain "$@" &
run=$!
trap 'kill -TERM $run' TERM
status=0
wait $run || status=$?
if kill -0 $run 2> /dev/null; then wait $run || status=$?; fi  # the signal ended the first wait; the run is saving its state
kill %% $(jobs -p) 2> /dev/null || true
exit $status
