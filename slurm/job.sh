# The body of one_node.sbatch and many_nodes.sbatch, which source it: it runs once, on the first node of the job.
#
# It starts slurm/node.sh on every node, which starts slurm/rank.sh for every process, and requeues the job when Slurm has warned it of
# its time limit and the run has saved. A requeued job keeps its id, so it finds its folder again and goes on from the newest checkpoint.
# This file's output and the launchers' go to slurm-<job>.out, each process's to RUN/logs/<job>-<start>/rank-<rank>.log.
set -u

fail() {
    echo "slurm/job.sh: $1" >&2
    exit 2
}

[[ -n ${SLURM_JOB_ID:-} ]] || fail "this is no Slurm job: sbatch slurm/one_node.sbatch [words and flags of train.py]"
[[ -f $config ]] || fail "there is no accelerate config $config"

# The run's folder: --output-dir where it was given, else one named after the job.
output_dir=runs/$SLURM_JOB_NAME-$SLURM_JOB_ID
previous=
for word in "$@"; do
    [[ $previous == --output-dir ]] && output_dir=$word
    [[ $word == --output-dir=* ]] && output_dir=${word#*=}
    previous=$word
done
start=${SLURM_RESTART_COUNT:-0}
logs=$output_dir/logs/$SLURM_JOB_ID-$start
mkdir -p "$logs" || fail "cannot write to $output_dir"

# Rank 0 runs on the first node. Its address is the one that Slurm itself reaches it by: a node's name need not resolve.
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
address=$(scontrol --oneliner show node "$first_node" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
[[ -n $address ]] || fail "scontrol knows no address of $first_node, the first of $SLURM_JOB_NODELIST"

[[ -d $environment ]] && export PATH=$PWD/$environment/bin:$PATH
export PYTHONUNBUFFERED=1
export JOB_CONFIG=$config JOB_ADDRESS=$address JOB_LOGS=$logs JOB_SAVE_SECONDS=$save_seconds
export JOB_PORT=$((20000 + SLURM_JOB_ID % 10000)) # jobs that share a node do not share a port
export JOB_PROCESSES=$((SLURM_JOB_NUM_NODES * processes_per_node))

echo "start $start on $SLURM_JOB_NODELIST, rank 0 at $address:$JOB_PORT, $JOB_PROCESSES processes; logs in $logs"
# A process that dies ends the others at once, instead of leaving them to wait for it.
srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \
    bash slurm/node.sh "$@" --output-dir "$output_dir" --auto-resume --stop-grace "$save_seconds" &
srun_id=$!

kill_at= # set by the warning, in seconds since the start
on_warning() {
    [[ -n $kill_at ]] && return
    if [[ ! -e $logs/rank-0.pid ]]; then
        echo "warned by Slurm before the run could start: give the job more --time (the warning comes 300 s before the limit)"
        kill -KILL "$srun_id"
        return
    fi
    kill_at=$((SECONDS + save_seconds + 15))
    echo "warned by Slurm: the run finishes its step and saves"
    # Rank 0 runs on this node. Slurm's own way, scancel --signal, would reach whatever else the processes have started too.
    kill -USR1 "$(cat "$logs/rank-0.pid")"
}
trap on_warning USR1
trap : TERM # of preemption, scancel or the limit: the processes get it too, and are waited for

while kill -0 "$srun_id" 2>/dev/null; do
    [[ -n $kill_at ]] && ((SECONDS > kill_at)) && kill -KILL "$srun_id"
    sleep 1 &>/dev/null &
    wait -n # for either of the two, or a trapped signal
done
wait "$srun_id"
code=$?

if [[ -e $logs/requeue ]] || [[ -n $kill_at && $code -eq 137 ]]; then
    [[ -e $logs/requeue ]] || echo "not stopped by itself: the newest checkpoint holds"
    if ((start >= max_restarts)); then
        echo "not requeued after $start restarts; to go on, submit again with --output-dir $output_dir"
    else
        echo "requeuing, unless the job was cancelled"
        scontrol requeue Incomplete "$SLURM_JOB_ID" # incomplete: a job that scancel ended is not started again
    fi
    exit 75
fi
((code == 0)) && echo "done: $output_dir" && exit 0
echo "failed with code $code; the end of $logs/rank-0.log:"
tail --lines=40 "$logs/rank-0.log" 2>/dev/null
exit "$code"
