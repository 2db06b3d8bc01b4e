# shellcheck shell=bash
# What `./start.sh test` runs. Sourced by start.sh; the environment is ready when suites_run is called.
# Each suite is a process of its own: vLLM keeps engines, plugins and environment variables per process.

SUITES=(lint types unit releases engine server launcher)
SUITE_LIMIT_S=2400 # a suite that hangs must not take the others' time

suites_parse() {
  full=no
  selected=()
  local word
  for word in "$@"; do
    case $word in
    --full) full=yes ;;
    lint | types | unit | releases | engine | server | launcher | gpu) selected+=("$word") ;;
    *) die "unknown test suite '$word': the suites are ${SUITES[*]} gpu, and --full adds the long tests." ;;
    esac
  done
  if ((${#selected[@]} == 0)); then
    selected=("${SUITES[@]}")
    # Without a device every one of them would be skipped.
    if [[ $full == yes ]] && nvidia-smi -L >/dev/null 2>&1; then selected+=(gpu); fi
  fi
  [[ $full == no ]] || SUITE_LIMIT_S=14400
}

# suites_count FILE: passed, failed and skipped from a JUnit file, as three words.
suites_count() {
  "$VENV/bin/python" - "$1" <<'PY'
import sys
import xml.etree.ElementTree as tree

total = failed = skipped = 0
for suite in tree.parse(sys.argv[1]).iter("testsuite"):
    total += int(suite.get("tests", 0))
    failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    skipped += int(suite.get("skipped", 0))
print(max(total - failed - skipped, 0), failed, skipped)
PY
}

suites_check() { # NAME COMMAND...: one check that passes or fails as a whole
  local name=$1
  shift
  if (cd "$ROOT" && PATH="$VENV/bin:$PATH" "$@"); then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    say "FAILED: $name ($*)"
    return 1
  fi
}

suites_pytest() { # SUITE
  local suite=$1 select="not full and not gpu" report status=0 counts
  if [[ -z $(find "$ROOT/tests/$suite" -name 'test_*.py' -print -quit 2>/dev/null) ]]; then
    say "tests/$suite has no tests."
    note="no tests"
    return 0
  fi
  [[ $full == no ]] || select="not gpu"
  [[ $suite != gpu ]] || select="gpu"
  report=$scratch/$suite.xml
  (cd "$ROOT" && PATH="$VENV/bin:$PATH" PYTHONUNBUFFERED=1 timeout --foreground --kill-after=30 "$SUITE_LIMIT_S" \
    "$VENV/bin/python" -m pytest "tests/$suite" -q --no-header --durations=5 -m "$select" --junitxml="$report") || status=$?
  if [[ -f $report ]]; then
    counts=$(suites_count "$report")
    read -r suite_passed suite_failed suite_skipped <<<"$counts"
    passed=$((passed + suite_passed)) failed=$((failed + suite_failed)) skipped=$((skipped + suite_skipped))
    note="$suite_passed passed, $suite_failed failed, $suite_skipped skipped"
    ((suite_failed == 0)) || return 1
  fi
  case $status in
  0 | 5) return 0 ;; # 5: every test here is deselected
  124 | 137) note="stopped after $SUITE_LIMIT_S s" ;;
  *) note="pytest ended with status $status" ;;
  esac
  failed=$((failed + 1))
  return 1
}

suites_run() {
  local suite started verdict code=0 summary=()
  passed=0 failed=0 skipped=0
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  trap 'say "interrupted."; exit 130' INT TERM
  for suite in "${selected[@]}"; do
    say "== $suite"
    started=$SECONDS verdict=ok note=
    case $suite in
    lint)
      suites_check "ruff check" ruff check . || verdict=FAILED
      suites_check "ruff format" ruff format --check . || verdict=FAILED
      ;;
    types)
      suites_check mypy mypy || verdict=FAILED
      suites_check "mypy launcher" mypy --strict launcher || verdict=FAILED
      ;;
    *) suites_pytest "$suite" || verdict=FAILED ;;
    esac
    [[ $verdict == ok ]] || code=1
    summary+=("$(printf '%-10s %-7s %5d s  %s' "$suite" "$verdict" $((SECONDS - started)) "$note")")
  done
  say
  printf '%s\n' "${summary[@]}"
  say
  say "$passed passed, $failed failed, $skipped skipped in $SECONDS s"
  exit "$code"
}
