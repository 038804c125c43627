#!/usr/bin/env bash
# One task of the component that serves: a data server, started again when it crashes. train.sbatch sets the variables.
# It listens for data connections on the port 1000 above its own, or on a free one if another job has that.
# Threads and memory are given, since not every cluster limits its tasks by control groups.
set -uo pipefail
share=$(((SERVER_MEMORY << 20) / 6))
least=$((64 << 20))
while true; do
    dataserver serve --config "$SERVE_CONFIG" --listen "0.0.0.0:$((FIRST_PORT + SLURM_PROCID))" --insecure \
        --peers "$SERVERS" --decode-threads "$SLURM_CPUS_PER_TASK" \
        --prefetch-bytes "$share" --job-bytes $((share > least ? share : least))
    code=$?
    # 0: it was told to end. 2: its configuration is wrong, which no restart changes.
    [[ $code == 0 || $code == 2 || $code == 130 || $code == 143 ]] && exit "$code"
    echo "server.sh: the server ended with status $code and is started again" >&2
    sleep 2
done
