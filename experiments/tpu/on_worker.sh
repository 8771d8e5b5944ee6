#!/usr/bin/env bash
# The part of run_on_tpu_vm.sh that runs on a worker: install | start | run | status | stop.
#
# Settings come from the environment: CONFIG, WORKDIR, BUCKET, MOUNT, ARGS (see run_on_tpu_vm.sh). DISTRIBUTED=1: this
# worker is one of several that run one job in one shared WORKDIR. PYTHON is the interpreter of the job, SYNC_SECONDS
# the time between two copies to the bucket.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
venv="$HOME/seal_venv"
PYTHON="${PYTHON:-$venv/bin/python}"
SYNC_SECONDS="${SYNC_SECONDS:-300}"
CONFIG="${CONFIG:-}" WORKDIR="${WORKDIR:-runs/seal}" BUCKET="${BUCKET:-}" MOUNT="${MOUNT:-}" ARGS="${ARGS:-}" DISTRIBUTED="${DISTRIBUTED:-}"
[[ "$WORKDIR" == /* ]] || WORKDIR="$HOME/$WORKDIR"
# Beside the workdir, not in it: the workdir is copied to the bucket and back.
state="$HOME/.seal_job"
# A TPU VM's hosts are named ...-w-0, ...-w-1, ...
worker="$(hostname | sed -n 's/.*-w-\([0-9]*\)$/\1/p')"

case "${1:-}" in
  start | run)
    if [[ "${worker:-0}" != 0 && -z "$DISTRIBUTED" ]]; then
      echo "on_worker.sh: this is worker $worker, but the job is of one host; give DISTRIBUTED=1 to all workers" >&2
      exit 2
    fi
    if [[ -n "$DISTRIBUTED" && -n "$BUCKET" ]]; then
      echo "on_worker.sh: BUCKET is copied to each worker's own disk, but several workers need one shared WORKDIR" >&2
      exit 2
    fi
    ;;
esac

case "${1:-}" in
  install)
    # TPU images ship Python 3.10; uv brings a newer one without touching the system.
    python3 -m pip install --quiet --user uv
    python3 -m uv venv --quiet --clear --python 3.12 "$venv"
    VIRTUAL_ENV="$venv" python3 -m uv pip install --quiet -e "${here}[tpu,gguf]"
    VIRTUAL_ENV="$venv" python3 -m uv pip install --quiet --no-deps bfcl-eval==2026.3.23
    "$PYTHON" -c 'import seal_jax, jax; print("jax", jax.__version__)'
    ;;
  start)
    mkdir -p "$state"
    if [[ -f "$state/pid" ]] && kill -0 "$(cat "$state/pid")" 2>/dev/null; then
      echo "already running as process $(cat "$state/pid")"
      exit 0
    fi
    rm -f "$state/exit" "$state/pid"
    export CONFIG WORKDIR BUCKET MOUNT ARGS DISTRIBUTED PYTHON SYNC_SECONDS
    if command -v tmux >/dev/null; then
      # tmux's server keeps its own environment: the settings are handed over in the command.
      tmux new-session -d -s seal "$(printf \
        'env CONFIG=%q WORKDIR=%q BUCKET=%q MOUNT=%q ARGS=%q DISTRIBUTED=%q PYTHON=%q bash %q run' \
        "$CONFIG" "$WORKDIR" "$BUCKET" "$MOUNT" "$ARGS" "$DISTRIBUTED" "$PYTHON" "${BASH_SOURCE[0]}")"
    else
      nohup bash "${BASH_SOURCE[0]}" run >/dev/null 2>&1 </dev/null &
    fi
    echo "started"
    ;;
  run)
    mkdir -p "$state"
    echo $$ >"$state/pid"
    # The first thing that fails is the exit code that `status` reports.
    trap 'code=$?; echo "$code" >"$state/exit"' EXIT
    exec >>"$state/log" 2>&1
    echo "== $(date -u +%FT%TZ) $CONFIG $ARGS"
    [[ -z "$MOUNT" ]] || bash -c "$MOUNT"
    mkdir -p "$WORKDIR"
    to_bucket() { gcloud storage rsync --recursive --delete-unmatched-destination-objects "$WORKDIR" "$BUCKET"; }
    # Only a listing that says so makes the bucket empty. Any other failure ends the job: it would begin at round 0, and
    # its first upload would delete the run that lies in the bucket.
    from_bucket() {
      local listed
      if listed="$(gcloud storage ls "${BUCKET%/}/**" 2>&1)"; then
        gcloud storage rsync --recursive "$BUCKET" "$WORKDIR" && return
      elif [[ "$listed" == *"matched no objects"* ]]; then
        echo "nothing in $BUCKET yet"
        return
      fi
      echo "$listed" | tail -n 3
      echo "$BUCKET cannot be copied from; nothing was started. Run the step start again when it can be read"
      exit 1
    }
    copier=""
    if [[ -n "$BUCKET" ]]; then
      from_bucket
      (while sleep "$SYNC_SECONDS"; do to_bucket || true; done) &
      copier=$!
    fi
    code=0
    # shellcheck disable=SC2086
    (cd "$here" && exec env SEAL_JAX_COMMIT="$(cat COMMIT 2>/dev/null || echo unknown)" \
      "$PYTHON" -m seal_jax.main "--config=$CONFIG" "--workdir=$WORKDIR" ${DISTRIBUTED:+--distributed} $ARGS) ||
      code=$?
    if [[ -n "$copier" ]]; then
      kill "$copier" 2>/dev/null || true
      to_bucket
    fi
    exit "$code"
    ;;
  status)
    if [[ -f "$state/exit" ]]; then
      echo "finished with $(cat "$state/exit")"
    elif [[ -f "$state/pid" ]] && kill -0 "$(cat "$state/pid")" 2>/dev/null; then
      echo "running as process $(cat "$state/pid")"
    else
      echo "not started"
    fi
    [[ ! -f "$state/log" ]] || tail -n 20 "$state/log"
    ;;
  stop)
    [[ -f "$state/pid" ]] || exit 0
    # To the children only (the job's python): the run script itself goes on, copies to the bucket and notes the exit.
    pkill -TERM -P "$(cat "$state/pid")" || true
    ;;
  *)
    echo "on_worker.sh: give one of install, start, run, status, stop" >&2
    exit 2
    ;;
esac
