#!/usr/bin/env bash
# One command line for dflash-verify: try it, test it, serve with it. `./start.sh help` lists the commands.
set -euo pipefail

say() { printf '%s\n' "$*"; }
die() {
  printf 'start.sh: %s\n' "$*" >&2
  exit 1
}

if [[ $(uname -s) != Linux ]]; then
  die "this runs on Linux only and found $(uname -s): use a Linux machine, a container or WSL2."
fi

# The file itself, also when a link to it is called.
self=${BASH_SOURCE[0]}
[[ ! -L $self ]] || self=$(readlink -f -- "$self")
ROOT=$(cd -- "$(dirname -- "$self")" && pwd -P)
readonly ROOT

usage() {
  cat <<'TEXT'
usage: ./start.sh [COMMAND] [OPTIONS]

Try it and test it (installs into .venv, or $DFLASH_VENV, what is missing)
  setup               install only
  demo                the real vLLM engine on this CPU: stock, width 3, width 1
  test [SUITE...]     lint types unit releases engine server launcher; --full adds the long ones

Serve (settings: .env, made from .env.example at the first run; a value given inline wins)
  start               serve on this host, or on two hosts with one tensor-parallel model (default)
  stop                stop every container, in 30 s at most
  restart             stop, then start
  status              health, plan digest, restart counts, GPU temperature
  logs [worker] [-f]  the log of the head, or of the worker
  check [--gpu]       overlay self-check in the image, on every host
  plan                widths, capture sizes and graph memory of the present settings;
                      runs in .venv (setup makes it), else needs docker and the image
  profile             measure step time per width and batch size; stores the cost table
  bench               measure the running server
  --dry-run           with any of these: print, per host, the commands that would run; secrets are masked
TEXT
}

# setup, demo and test install packages; the serving commands need nothing but bash, ssh, docker and Python's standard library.
command=start
if [[ $# -gt 1 && $1 == --dry-run ]]; then
  set -- "$2" --dry-run "${@:3}"
fi
if [[ $# -gt 0 && $1 != --dry-run ]]; then
  command=$1
  shift
fi

# Before anything is installed.
case $command in
setup) [[ $# -eq 0 ]] || die "setup does not know '$1': it takes no options." ;;
demo) [[ ${1-} != --dry-run ]] || die "demo does not know '--dry-run': that is for the serving commands." ;;
esac

case $command in
setup | demo | test)
  # shellcheck source=launcher/environment.sh
  . "$ROOT/launcher/environment.sh"
  # shellcheck source=launcher/suites.sh
  . "$ROOT/launcher/suites.sh"
  ;;
esac

case $command in
help | -h | --help) usage ;;
setup) environment_setup ;;
demo)
  environment_setup
  exec "$VENV/bin/dflash-verify" demo "$@"
  ;;
test)
  suites_parse "$@"
  environment_setup
  suites_run
  ;;
start | stop | restart | status | logs | check | plan | profile | bench | watch-ranks)
  python=$(command -v python3) || die "python3 is missing: the launcher needs Python 3.10 or newer (no packages)."
  # No PYTHONPATH: a server without docker would inherit it.
  exec "$python" -B -c 'import sys; sys.path.insert(0, sys.argv[1]); from launcher.main import main; main()' "$ROOT" "$command" "$@"
  ;;
*) die "unknown command '$command': ./start.sh help lists them." ;;
esac
