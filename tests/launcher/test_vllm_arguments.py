"""The arguments that the launcher makes, read by vLLM's own command line parser."""

import json
import os
import subprocess
import sys

from .conftest import ROOT

sys.path.insert(0, str(ROOT))

from launcher.settings import DEFAULTS, validate

from launcher import ranks

# The parser's defaults ask for a device, which the CPU platform of demo and tests provides.
ENVIRONMENT = {
    "DFLASH_CPU": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "src" / "dflash_verify" / "cpu" / "plugin_path")]),
}
PARSE = """
import json, sys
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
names = ("model_tag", "revision", "served_model_name", "host", "port", "tensor_parallel_size", "max_num_seqs", "max_model_len",
         "kv_cache_dtype", "gpu_memory_utilization", "speculative_config", "distributed_executor_backend", "nnodes", "node_rank",
         "master_addr", "master_port", "headless", "seed")
print(json.dumps([{n: getattr(parser.parse_args(words), n) for n in names} for words in json.loads(sys.argv[1])]))
"""


def test_vllm_reads_every_argument_as_it_is_meant() -> None:
    changes = {
        "MODEL_REVISION": "abc",
        "SERVED_MODEL_NAME": "a name",
        "MAX_MODEL_LEN": "4096",
        "KV_CACHE_DTYPE": "fp8",
        "DRAFT_TP": "1",
        "DRAFT_REVISION": "def",
        "EXTRA_ARGS": "--seed 5",
    }
    pair = validate(DEFAULTS | changes)
    ray = validate(DEFAULTS | {"NODES": "1", "EXECUTOR": "ray", "TP_SIZE": "8", "DRAFT_MODEL": ""})
    asked = [[*ranks.vllm_arguments(s), *ranks.node_arguments(s, host)] for s in (pair, ray) for host in s.hosts]
    done = subprocess.run(
        [sys.executable, "-c", PARSE, json.dumps(asked)],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    head, worker, single = json.loads(done.stdout.splitlines()[-1])
    assert head == {
        "model_tag": DEFAULTS["MODEL"],
        "revision": "abc",
        "served_model_name": ["a name"],
        "host": "0.0.0.0",
        "port": 8000,
        "tensor_parallel_size": 2,
        "max_num_seqs": 8,
        "max_model_len": 4096,
        "kv_cache_dtype": "fp8",
        "gpu_memory_utilization": 0.85,
        "speculative_config": {
            "method": "dflash",
            "model": DEFAULTS["DRAFT_MODEL"],
            "num_speculative_tokens": 7,
            "revision": "def",
            "draft_tensor_parallel_size": 1,
        },
        "distributed_executor_backend": None,
        "nnodes": 2,
        "node_rank": 0,
        "master_addr": "192.168.100.10",
        "master_port": 29501,
        "headless": False,
        "seed": 5,
    }
    assert worker == head | {"node_rank": 1, "headless": True}
    assert (single["distributed_executor_backend"], single["tensor_parallel_size"]) == ("ray", 8)
    assert (single["nnodes"], single["speculative_config"]) == (1, None)
