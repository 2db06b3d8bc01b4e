"""What `bracket --example` prints; a module of its own, because printing it needs no package of the extra."""

EXAMPLE = """\
# dflash-verify bracket --config bracket.toml --out results/bracket
# The classic bracket: full width, narrow width, narrow proposal, full width again.
url = "http://127.0.0.1:8000"
workloads = ["structured", "code", "prose"]
concurrency = [1, 2, 4]
passes = 2                      # the order of the inner arms is reversed in every second pass
max_num_seqs = [2, 4]           # one bracket each; only with start or restart commands
ready_timeout_s = 1800
# differs_in = ["DFLASH_TOKENS", "DFLASH_VERIFY_TOKENS", "DRAFT_MODEL"]  # with the arm "off" below

# The commands below run with the arm's env. ./start.sh restart is an example; any command will do.
[[arm]]
name = "A1"
verify = 7
draft = 7
restart = "./start.sh restart"
env = { DFLASH_TOKENS = "7", DFLASH_VERIFY_TOKENS = "7" }

[[arm]]
name = "B"
verify = 3
draft = 7
restart = "./start.sh restart"
env = { DFLASH_TOKENS = "7", DFLASH_VERIFY_TOKENS = "3" }

[[arm]]
name = "C"
verify = 3
draft = 3
restart = "./start.sh restart"
env = { DFLASH_TOKENS = "3", DFLASH_VERIFY_TOKENS = "3" }

[[arm]]
name = "A2"
verify = 7
draft = 7
restart = "./start.sh restart"
env = { DFLASH_TOKENS = "7", DFLASH_VERIFY_TOKENS = "7" }

# On request:
# [[arm]]
# name = "auto"
# verify = "auto"
# draft = 7
# restart = "./start.sh restart"
# env = { DFLASH_TOKENS = "7", DFLASH_VERIFY_TOKENS = "auto" }
#
# [[arm]]
# name = "off"                  # no speculation
# verify = 0
# draft = 0
# restart = "./start.sh restart"
# env = { DRAFT_MODEL = "", DFLASH_VERIFY_TOKENS = "" }
#
# Live arms instead, on one server started with DFLASH_CONTROL_FILE=/path/control.json:
# control_file = "/path/control.json"
# [[arm]]
# name = "A1"
# width = 7
"""
