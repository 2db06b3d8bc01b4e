# shellcheck shell=bash
# The Python environment of setup, demo and test. Sourced by start.sh; sets VENV.
# A stamp in the environment holds what it was made from; it is written last, so an interrupted installation is
# simply continued by the next run.

VENV=${DFLASH_VENV:-$ROOT/.venv}
EXTRAS=vllm,bench,test
STAMP=$VENV/.dflash-verify-stamp
INSTALL_LOG=$VENV/install.log
MIN_FREE_GB=12

# The first Python that can make a virtual environment; vLLM 0.33.0 wants >= 3.11, < 3.15.
environment_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.12 python3.11 python3.13 python3.14 /usr/bin/python3; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

environment_fingerprint() {
  {
    cat "$ROOT/pyproject.toml"
    "$VENV/bin/python" -c 'import sys; print(sys.version)'
    printf '%s\n' "$EXTRAS" "$ROOT"
  } | sha256sum | cut -d' ' -f1
}

environment_is_current() {
  [[ -x $VENV/bin/python && -x $VENV/bin/dflash-verify && -f $STAMP ]] || return 1
  [[ $(<"$STAMP") == "$(environment_fingerprint)" ]]
}

# What pip said last and the time so far, until it is ended: on one line of a terminal, else every 20 s.
environment_progress() {
  local started=$SECONDS last=0 line
  while sleep 1; do
    line=$(grep -E '^ *(Collecting|Downloading|Installing|Building|Preparing|Obtaining)' "$INSTALL_LOG" | tail -n 1 | cut -c1-90) || line=
    line=${line#"${line%%[![:space:]]*}"}
    if [[ -t 1 ]]; then
      printf '\r\033[K  %3d s  %s' $((SECONDS - started)) "$line"
    elif ((SECONDS - last >= 20)); then
      last=$SECONDS
      printf '  %3d s  %s\n' $((SECONDS - started)) "$line"
    fi
  done
}

environment_interrupted() {
  trap - INT TERM
  # shellcheck disable=SC2046 # process ids
  kill $(jobs -p) 2>/dev/null || true
  die "interrupted: run it again, it continues where it stopped."
}

environment_install() {
  local started=$SECONDS pip progress status=0
  # pip works in the background, since `wait` is interrupted at once by a signal, and a command in the foreground is not.
  trap environment_interrupted INT TERM
  # pip's own progress bar is off: it would fill the log.
  PYTHONUNBUFFERED=1 "$VENV/bin/python" -m pip install --progress-bar off --disable-pip-version-check -e "${ROOT}[$EXTRAS]" \
    >"$INSTALL_LOG" 2>&1 &
  pip=$!
  environment_progress &
  progress=$!
  wait "$pip" || status=$?
  kill "$progress" 2>/dev/null || true
  wait "$progress" 2>/dev/null || true
  trap - INT TERM
  [[ ! -t 1 ]] || printf '\r\033[K'
  if ((status)); then
    # The warnings are pip talking about its mirrors.
    grep -v '^WARNING: Location' "$INSTALL_LOG" | tail -n 15 >&2 || true
    die "pip could not install the packages: the last lines are above, all of them are in $INSTALL_LOG."
  fi
  say "  installed in $((SECONDS - started)) s"
}

environment_setup() {
  environment_is_current && return
  local python free_gb
  mkdir -p "$(dirname -- "$VENV")" || die "cannot create $(dirname -- "$VENV"): set DFLASH_VENV to a folder that you may write."
  # One installation at a time; the second waits and then finds everything done.
  exec {environment_lock}>"$VENV.lock"
  flock "$environment_lock"
  if ! environment_is_current; then
    if [[ -e $VENV && ! -f $VENV/pyvenv.cfg ]] && [[ -n $(ls -A "$VENV" 2>/dev/null) ]]; then
      die "$VENV exists and is no Python environment: set DFLASH_VENV to another folder, or remove it."
    fi
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
      python=$(environment_python) ||
        die "no Python 3.11 to 3.14 with venv found: install one (Debian, Ubuntu: apt install python3 python3-venv), or set PYTHON to it."
      free_gb=$(df -Pk "$(dirname -- "$VENV")" | awk 'NR == 2 {print int($4 / 1048576)}')
      ((free_gb >= MIN_FREE_GB)) ||
        die "$(dirname -- "$VENV") has $free_gb GB free and the packages need $MIN_FREE_GB: make room, or set DFLASH_VENV to another disk."
      say "Making a Python environment in $VENV with $python."
      "$python" -m venv --clear "$VENV" || die "$python could not make an environment in $VENV."
    fi
    say "Installing vLLM and the rest into $VENV: about 3 minutes and 10 GB the first time, then never again."
    environment_install
    environment_fingerprint >"$STAMP.new"
    mv "$STAMP.new" "$STAMP"
  fi
  exec {environment_lock}>&-
}
