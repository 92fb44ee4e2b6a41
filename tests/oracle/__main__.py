"""The oracle on GPUs, one process a GPU over NCCL, with the code of the tests.

    python -m tests.oracle --gpus 4                          # every case that fits 4 GPUs, both back ends of layers
    python -m tests.oracle --gpus 1 --backend portable -k "deepseek_v3.*bf16" --json oracle.json
    python -m tests.oracle --gpus 0                          # the same cases of 4 ranks on the CPU, over gloo

Prints a line a case and a table of the worst errors; exits with 1 when a bound is broken.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quintet.cluster.environment import FP32_PRODUCTS

os.environ.update(FP32_PRODUCTS | os.environ)  # read when CUDA starts
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # megatron-core's tensor parallelism asks for it

from benchmarks.records import record, write_records
from tests.oracle.cases import Case, gpu_cases
from tests.oracle.compare import Error, broken, errors
from tests.oracle.lora import written
from tests.oracle.matrix import BACKENDS
from tests.oracle.pool import Pool
from tests.oracle.ranks import train
from tests.oracle.reference import reference

Found = dict[Case, dict[str, Error]]
CPU_RANKS = 4


def chosen(gpus: int, backend: str, pattern: str) -> list[Case]:
    """The cases asked for. gpus: 0 for CPU_RANKS processes on the CPU, where the state is on the CPU anyhow."""
    backends = BACKENDS if backend == "all" else (backend,)
    cases = gpu_cases(gpus or CPU_RANKS, backends)
    if not gpus:
        cases = [case for case in cases if case.backend == "portable" and not case.cpu_optimizer]
    return [case for case in cases if re.search(pattern, case.name)]


def run(cases: Sequence[Case], pool: Pool, models: Path) -> tuple[Found, list[str]]:
    """Errors of each case that ran to its end, and what went wrong, one text a case; prints as it goes."""
    found: Found = {}
    failed = []
    for number, case in enumerate(cases, start=1):
        begin = time.monotonic()
        path = written(case, models)
        try:
            reports = pool.run(train, case.ranks, case, path, timeout_s=300)
            found[case] = errors(case, reports, reference(case))
            wrong = "; ".join(broken(case, found[case]))
        except AssertionError as error:  # nothing to compare; a rank that died (PoolError) is one, too
            wrong = str(error)
        if wrong:
            failed.append(f"{case.name}: {wrong}")
        said = "FAILED" if wrong else "ok"
        worst = f"gradients {found[case]['gradients'].size:.1e}" if case in found else ""
        took = time.monotonic() - begin
        print(f"{number}/{len(cases)} {said} {case.ranks} ranks {took:.1f} s {worst} {case.name}", flush=True)
        if wrong:
            print(wrong, flush=True)
    return found, failed


def summary(found: Found) -> dict[str, dict[str, Error]]:
    """The worst error of each kind by back end, float type and family."""
    groups: defaultdict[str, dict[str, Error]] = defaultdict(dict)
    for case, kinds in found.items():
        group = groups[f"{case.family}/{case.backend}/{case.dtype}"]
        for kind, error in kinds.items():
            group[kind] = max(group.get(kind, error), Error(error.size, f"{case.name}: {error.where}"))
    return dict(sorted(groups.items()))


def table(groups: Mapping[str, Mapping[str, Error]], counts: Mapping[str, int]) -> str:
    """The summary as text."""
    kinds = list(next(iter(groups.values()), {}))
    lines = [["", "cases", *kinds]]
    for name, group in groups.items():
        lines.append([name, str(counts[name]), *(f"{group[kind].size:.1e}" for kind in kinds)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)


def records(
    groups: Mapping[str, Mapping[str, Error]],
    counts: Mapping[str, int],
    failed: int,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """The summary as benchmark records."""
    made = [record("oracle", "all", "failed", float(failed), "cases")]
    for name, group in groups.items():
        made.append(record("oracle", name, "cases", float(counts[name]), "cases"))
        made += [
            record("oracle", name, f"worst_{kind}", e.size, "relative error") for kind, e in group.items()
        ]
    command = f"python -m tests.oracle --gpus {options.gpus} --backend {options.backend}"
    return [
        one | {"command": command + (f" -k {shlex.quote(options.k)}" if options.k else "")} for one in made
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle", description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", type=int, required=True, choices=(0, 1, 2, 4, 8))
    parser.add_argument("--backend", choices=(*BACKENDS, "all"), default="all")
    parser.add_argument("--json", type=Path, help="write the worst errors as benchmark records")
    parser.add_argument("-k", default="", metavar="REGEX", help="only cases whose name matches")
    options = parser.parse_args(arguments)
    cases = chosen(options.gpus, options.backend, options.k)
    pool = Pool(size=options.gpus or CPU_RANKS)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        found, failed = run(cases, pool, Path(root))
    pool.close()
    groups = summary(found)
    counts = {name: sum(f"{c.family}/{c.backend}/{c.dtype}" == name for c in found) for name in groups}
    print(
        f"\n{table(groups, counts)}\n\n{len(cases)} cases, {len(failed)} failed, {time.monotonic() - begin:.0f} s"
    )
    for text in failed:
        print("FAILED", text.splitlines()[0])
    if options.json:
        write_records(options.json, records(groups, counts, len(failed), options))
    return int(bool(failed) or not cases)


if __name__ == "__main__":
    sys.exit(main())
