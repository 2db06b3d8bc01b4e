"""Serving with `./start.sh`: one host or two, in containers. Standard library only (Python 3.10 and newer), because a
host that serves has bash, ssh, docker and python3, and need not have anything else.

  main.py        commands and their words
  settings.py    .env and the environment -> Settings, one sentence per error
  dotenv.py      reads .env; nothing in it is ever evaluated
  bundle.py      the plugin as one folder, named by its content
  ranks.py       Settings -> the exact commands of every host
  hosts.py       runs commands here or over ssh, always with a time limit
  digests.py     the plan digest that every rank logged
  readiness.py   health, then completions at every concurrency
  serve.py       start, stop, restart, and what happens when something fails between them
  state.py       what was started, so that stop works without any settings
  watch.py       stops everything when a rank ends
  report.py      status, logs
  tools.py       check, plan, bench

environment.sh and suites.sh beside them are setup, demo and test, which do install packages.
"""
