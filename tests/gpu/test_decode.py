"""The script that measures decode steps runs, on a CPU and with a tiny model; what it prints there means nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path


def test_the_script_measures_every_contender(tmp_path):
    script, results = Path(__file__).with_name("decode.py"), tmp_path / "results.json"
    tiny = ["--device", "cpu", "--shape", "tiny", "--batches", "3", "--json", str(results)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(script), *tiny], check=True, timeout=120, env=environment)
    told = json.loads(results.read_text())
    [row] = told["results"]
    assert row["rows"] == 3 and None not in row.values()
    assert told["recorded_difference"] < 1e-4
