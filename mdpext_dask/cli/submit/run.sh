# Workers on one node listen on loopback: nobody else needs to reach them. Between nodes they listen on the
# interface that MDPEXT_INTERFACE names, such as ib0, or else on the one by which this node reaches others.
listen=()
if [ "${SLURM_JOB_NUM_NODES:-1}" -eq 1 ]; then
  listen=(--host 127.0.0.1)
elif [ -n "${MDPEXT_INTERFACE:-}" ]; then
  listen=(--interface "$MDPEXT_INTERFACE")
fi
# Workers end with their scheduler.
end() {
  kill "$scheduler"
  timeout 20 tail --pid="$workers" -f /dev/null || kill "$workers"
  wait
} 2>/dev/null
trap end EXIT

# An earlier attempt may have left its own.
rm -f scheduler.json
"$python" -m dask scheduler "${listen[@]}" --port 0 --dashboard-address 127.0.0.1:0 \
  --scheduler-file scheduler.json &
scheduler=$!
while [ ! -s scheduler.json ] && kill -0 "$scheduler" 2>/dev/null; do sleep 0.2; done

srun --ntasks="$count" --cpus-per-task=1 --kill-on-bad-exit=0 --input=none --mpi=none \
  --output=run-%j-workers.out --open-mode=append \
  "$python" -m dask worker --scheduler-file scheduler.json "${listen[@]}" --nthreads 1 \
  --memory-limit "$limit" --no-dashboard --death-timeout 60 &
workers=$!

"$python" -m mdpext_dask.cli run job.toml --store "$store" --progress plain &
client=$!
wait -n "$scheduler" "$workers" "$client"
told=
if kill -0 "$client" 2>/dev/null; then
  # The client may notice by itself; if not, it is told, and ends as if somebody had interrupted it.
  timeout 30 tail --pid="$client" -f /dev/null || { kill "$client" && told=yes; }
fi
wait "$client"
code=$?
if [ "$code" -gt 128 ] || [ "$told$code" = yes3 ]; then
  echo "error: scheduler, workers or client were killed; what is done is kept, submit again" >&2
  code=3
fi
exit "$code"
