#!/usr/bin/env bash
# Runs one training job on a Cloud TPU VM: create, install, start, wait, fetch, delete. Needs gcloud, signed in.
#
#   experiments/tpu/run_on_tpu_vm.sh all --name seal-1 --zone us-west4-a --type v5litepod-4 \
#       --config configs/toolbox.py --args "--config.mesh.data=4 --config.learner.prompts_per_micro=4" \
#       --bucket gs://my-bucket/seal-1 --spot
#
# Steps (`all` does them in this order; each can be given by itself, so an interrupted job is picked up where it was):
#   create   makes the VM (with --queued: files a queued resource and waits until it is active)
#   install  sends the committed tree (git archive HEAD) to the VM and installs `.[tpu]` in a new environment
#   start    starts the job in tmux (nohup where there is none); it goes on when the connection ends
#   wait     polls the VM until the job has ended
#   fetch    copies the workdir without its checkpoints to ./runs/NAME (with --checkpoints: all of it)
#   delete   deletes the VM
# More steps: status (log tail), stop (ends the job, keeps the VM).
#
# Options:
#   --name NAME          VM name; also the run's name                    (required)
#   --zone ZONE          e.g. us-west4-a                                 (required)
#   --type TYPE          accelerator type, e.g. v5litepod-4, v4-8        (required by create and start)
#   --version RUNTIME    TPU software version                            (default: chosen by type)
#   --project PROJECT    Google Cloud project                            (default: gcloud's own)
#   --config CONFIG      config file, as for seal_jax.main               (required by start)
#   --args "..."         more flags for seal_jax.main, e.g. "--config.seed=2"
#   --bucket gs://B/P    the workdir is copied from there before the job and back every few minutes and at its end
#   --mount "COMMAND"    run on the VM before the job, e.g. to mount a file system
#   --workdir DIR        workdir on the VM                               (default: runs/NAME in the home folder)
#   --spot               a preemptible VM: much cheaper, may be taken away at any time
#   --queued             through a queued resource: waits for capacity instead of failing
#   --keep               `all` leaves the VM running at its end
#   --checkpoints        fetch takes the checkpoints too
#   --dry-run            prints every command, runs none
#
# Costs: a TPU VM is billed from its creation until its deletion, whether it works or idles, and also when this script
# or your connection dies. The script prints the delete command whenever it ends early. Look up the price of TYPE in
# your zone before you start, and set a budget alert. A bucket in another region costs traffic too.
#
# Resuming: the job resumes by itself from the newest checkpoint in its workdir. On a VM that still exists, `start` is
# enough. After a spot VM was taken away, run `all` again with the same --name and --bucket: the workdir comes back from
# the bucket. Without --bucket the workdir lives and dies with the VM.
#
# Several hosts (a number above 8 in TYPE): every worker runs one process of the job (`--distributed`). They need one
# shared workdir: --mount mounts it on every worker (Filestore or another NFS), and --workdir is a path on it. --bucket
# is for one host, because it copies to a worker's own disk. The job uses the chips that config.mesh says: by default
# one, and of several hosts it has to take all (--args "--config.mesh.fsdp=-1 ..."). See docs/many_hosts.md.
#
# Tested by a dry run and with stand-ins for gcloud and python; nobody has run it on a real TPU for this repository.
set -euo pipefail

usage() { sed -n '2,/^set -euo/p' "${BASH_SOURCE[0]}" | sed -e '/^set -euo/d' -e 's/^# \{0,1\}//'; }
fail() {
  echo "run_on_tpu_vm.sh: $1" >&2
  exit 2
}

[[ $# -ge 1 ]] || fail "no step given; try --help"
case "$1" in
  -h | --help)
    usage
    exit 0
    ;;
  all | create | install | start | wait | fetch | delete | status | stop) step="$1" ;;
  *) fail "unknown step '$1'; steps are all, create, install, start, wait, fetch, delete, status, stop" ;;
esac
shift

name="" zone="" type="" version="" project="" config="" args="" bucket="" mount="" workdir=""
spot=0 queued=0 keep=0 checkpoints=0 dry_run=0
while [[ $# -gt 0 ]]; do
  case "$1" in
    --name | --zone | --type | --version | --project | --config | --args | --bucket | --mount | --workdir)
      [[ $# -ge 2 ]] || fail "$1 needs a value"
      printf -v "${1#--}" '%s' "$2"
      shift 2
      ;;
    --spot | --queued | --keep | --checkpoints)
      printf -v "${1#--}" '%s' 1
      shift
      ;;
    --dry-run)
      dry_run=1
      shift
      ;;
    *) fail "unknown option '$1'; try --help" ;;
  esac
done

[[ -n "$name" ]] || fail "--name is missing"
[[ "$name" =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] || fail "--name '$name' must be lower-case letters, digits and hyphens"
[[ -n "$zone" ]] || fail "--zone is missing"
needs_type=" all create start "
[[ "$needs_type" != *" $step "* || -n "$type" ]] || fail "--type is missing, e.g. --type v5litepod-4"
# In every generation a number above 8 (chips or cores) takes more than one host.
distributed=""
[[ ! "$type" =~ -([0-9]+)$ || $((10#${BASH_REMATCH[1]})) -le 8 ]] || distributed=1
if [[ -n "$distributed" && "$needs_type" == *" $step "* && "$step" != create ]]; then
  [[ -z "$bucket" ]] ||
    fail "--type $type has several hosts, which need one shared workdir; give --mount and --workdir in place of --bucket"
  [[ "$workdir" == /* ]] ||
    fail "--type $type has several hosts; --workdir '$workdir' must be an absolute path on a file system that they share"
fi
needs_config=" all start "
[[ "$needs_config" != *" $step "* || -n "$config" ]] || fail "--config is missing, e.g. --config configs/toolbox.py"
[[ -z "$bucket" || "$bucket" == gs://* ]] || fail "--bucket '$bucket' must begin with gs://"
workdir="${workdir:-runs/$name}"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

if [[ -z "$version" ]]; then
  case "$type" in
    v5litepod-*) version=v2-alpha-tpuv5-lite ;;
    v5p-*) version=v2-alpha-tpuv5 ;;
    v6e-*) version=v2-alpha-tpuv6e ;;
    *) version=tpu-ubuntu2204-base ;;
  esac
fi

where=("--zone=$zone")
[[ -z "$project" ]] || where+=("--project=$project")

# Prints a command so that it can be pasted into a shell; runs it unless this is a dry run.
run() {
  local word line="+"
  for word in "$@"; do
    [[ "$word" =~ ^[A-Za-z0-9_./:=,@+-]+$ ]] || word="'${word//\'/\'\\\'\'}'"
    line+=" $word"
  done
  printf '%s\n' "$line"
  [[ "$dry_run" == 1 ]] || "$@"
}
# On a VM with several workers `all` below is each of them.
ssh_to() { run gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" "--worker=$1" "--command=$2"; }

# The job's settings as the worker script reads them; each value quoted once for the remote shell.
job() {
  printf 'CONFIG=%q WORKDIR=%q BUCKET=%q MOUNT=%q ARGS=%q DISTRIBUTED=%q bash seal_jax/experiments/tpu/on_worker.sh %s' \
    "$config" "$workdir" "$bucket" "$mount" "$args" "$distributed" "$1"
}

create() {
  echo "# $type in $zone is billed from now until it is deleted: $(delete_command)"
  local options=("${where[@]}" "--accelerator-type=$type")
  [[ "$spot" == 0 ]] || options+=("--spot")
  if [[ "$queued" == 1 ]]; then
    run gcloud compute tpus queued-resources create "$name" "--node-id=$name" "${options[@]}" "--runtime-version=$version"
    echo "# waiting until the queued resource is ACTIVE"
    local describe=(gcloud compute tpus queued-resources describe "$name" "${where[@]}" "--format=value(state.state)")
    if [[ "$dry_run" == 1 ]]; then
      run "${describe[@]}"
      return
    fi
    local state=""
    while [[ "$state" != ACTIVE ]]; do
      state="$("${describe[@]}")"
      echo "# $(date +%H:%M:%S) $state"
      case "$state" in FAILED | SUSPENDED) fail "the queued resource is $state; delete it and try again" ;; esac
      [[ "$state" == ACTIVE ]] || sleep 60
    done
  else
    run gcloud compute tpus tpu-vm create "$name" "${options[@]}" "--version=$version"
  fi
}

install() {
  local archive="${TMPDIR:-/tmp}/seal_jax-$name.tar.gz" commit
  commit="$(git -C "$root" rev-parse HEAD 2>/dev/null || echo unknown)"
  if [[ -n "$(git -C "$root" status --porcelain --untracked-files=no 2>/dev/null)" ]]; then
    echo "# warning: uncommitted changes are not sent; the job runs commit $commit"
  fi
  run git -C "$root" archive --format=tar.gz --prefix=seal_jax/ -o "$archive" HEAD
  run gcloud compute tpus tpu-vm scp "$archive" "$name:seal_jax.tar.gz" "${where[@]}" --worker=all
  ssh_to all "rm -rf seal_jax && tar xzf seal_jax.tar.gz && echo $commit > seal_jax/COMMIT"
  ssh_to all "bash seal_jax/experiments/tpu/on_worker.sh install"
}

start() { ssh_to all "$(job start)"; }
status() { ssh_to all "$(job status)"; }
stop() { ssh_to all "$(job stop)"; }

wait_for_job() {
  echo "# waiting until the job has ended (interrupt at will: it goes on; come back with the step 'wait')"
  if [[ "$dry_run" == 1 ]]; then
    ssh_to 0 "$(job status)"
    return
  fi
  local out
  while true; do
    out="$(gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker=0 "--command=$(job status)")" ||
      fail "worker 0 does not answer; a spot VM may have been taken away: run 'all' again with the same --bucket"
    echo "# $(date +%H:%M:%S) $(tail -n 1 <<<"$out")"
    case "$out" in
      "finished with 0"*) return 0 ;;
      "finished with "*) fail "the job failed; see the log: $0 status --name $name --zone $zone" ;;
      "not started"*) fail "no job on worker 0; run the step 'start' first" ;;
    esac
    sleep 60
  done
}

fetch() {
  run mkdir -p "$root/runs"
  local what="--exclude=checkpoints"
  [[ "$checkpoints" == 0 ]] || what=""
  ssh_to 0 "$(printf 'tar czf seal_run.tar.gz %s -C %q %q' "$what" "$(dirname "$workdir")" "$(basename "$workdir")")"
  run gcloud compute tpus tpu-vm scp "$name:seal_run.tar.gz" "$root/runs/$name.tar.gz" "${where[@]}" --worker=0
  run tar xzf "$root/runs/$name.tar.gz" -C "$root/runs"
}

delete_command() {
  if [[ "$queued" == 1 ]]; then
    echo "gcloud compute tpus queued-resources delete $name ${where[*]} --force --quiet"
  else
    echo "gcloud compute tpus tpu-vm delete $name ${where[*]} --quiet"
  fi
}
delete() {
  # shellcheck disable=SC2046
  run $(delete_command)
}

[[ "$dry_run" == 0 ]] || echo "# dry run: nothing is executed"
case "$step" in
  all)
    created=0
    trap '[[ $created == 0 || $dry_run == 1 ]] || echo "# ended early; the VM is still billed. Delete: $(delete_command)" >&2' EXIT
    created=1
    create
    install
    start
    wait_for_job
    fetch
    if [[ "$keep" == 1 ]]; then
      echo "# --keep: the VM is still billed. Delete it with: $(delete_command)"
    else
      delete
    fi
    created=0
    ;;
  wait) wait_for_job ;;
  *) "$step" ;;
esac
