#!/bin/sh
# Start gate, then `vllm serve` with the words of `docker run`. A server that was asked for a width does not begin to load
# weights when an overlay does not fit its vLLM; a stock server is not checked and finds no trace of this in its log.
set -eu

active() {
  [ "${DFLASH_BLOCK_VERIFY:-0}" = 1 ] && return 0
  case ${DFLASH_VERIFY_TOKENS:-0} in
  *[!0\ ]*) return 0 ;;
  esac
  return 1
}

if active && ! report=$(python3 -m dflash_verify.cli check 2>&1); then
  printf '%s\n' "$report" "The server does not start: unset DFLASH_VERIFY_TOKENS to serve stock vLLM, or use a supported image." >&2
  exit 1
fi

# As PID 1's successor vLLM gets SIGTERM itself.
exec vllm serve "$@"
