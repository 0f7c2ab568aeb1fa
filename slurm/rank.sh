# Started by accelerate's launcher for each process: train.py, writing to a log of its own.
rank=${RANK:-0}
trap '' USR1 # until train.py listens for it
trap : TERM  # train.py gets it too, and saves; this shell waits for it
(
    echo "$BASHPID" >"$JOB_LOGS/rank-$rank.pid"
    exec python train.py "$@" >>"$JOB_LOGS/rank-$rank.log" 2>&1
)
code=$?
# Exit code 75 (saved, run me again) would reach slurm/job.sh as the launcher's failure, with code 1. So it leaves as a file, and as 0.
((code == 75)) && touch "$JOB_LOGS/requeue" && exit 0
exit "$code"
