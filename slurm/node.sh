# Started by slurm/job.sh once on each node: accelerate's launcher, which starts slurm/rank.sh for each of the node's processes.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$JOB_SAVE_SECONDS       # after a SIGTERM the launcher gives its processes this long, not 30 s
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}      # launchers of other nodes tell at length that the first one ended first
processes_here=$((JOB_PROCESSES / SLURM_JOB_NUM_NODES)) cores=${SLURM_CPUS_ON_NODE:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes_here ? cores / processes_here : 1))} # the launcher would set 1
exec accelerate launch --config_file "$JOB_CONFIG" \
    --num_machines "$SLURM_JOB_NUM_NODES" --machine_rank "$SLURM_NODEID" --num_processes "$JOB_PROCESSES" \
    --main_process_ip "$JOB_ADDRESS" --main_process_port "$JOB_PORT" --rdzv_backend static --deepspeed_multinode_launcher standard \
    --no_python bash slurm/rank.sh "$@"
