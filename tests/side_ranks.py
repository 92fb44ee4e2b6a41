"""A rank of a side, as a module that a process runs: its arguments are what each rank does, by rank."""

from __future__ import annotations

import json
import os
import sys
import time

from benchmarks.sides import FAILED

if __name__ == "__main__":
    how = sys.argv[1 + int(os.environ["RANK"])]
    print("noise of a library", file=sys.stderr)
    if how == "fails":
        print(json.dumps({FAILED: "out of memory in burst (2 GiB)."}), flush=True)
    if how == "answers":
        print(json.dumps({"rank": int(os.environ["RANK"])}), flush=True)
    if how != "ends":
        time.sleep(1000)
