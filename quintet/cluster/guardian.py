"""What ends a run's processes when the run itself no longer can: it was killed, and they do not all notice, or not soon.

Ray's own agents stay for a minute, a verifier in the middle of a computation for as long as that takes, a process that is stopped
for ever. So a shell waits for the end of this process, which closes its input, kills all that belongs to the run's scratch
directory, and removes that: what was started with the directory's name in its environment, and those programs of a run that have a
file of it open (a process that sets its title may write over its environment). Whoever else reads such a file, as `tail -f` of a
log, stays; so does another run, which looks at the owner's file, and into directories, as it removes what killed ones have left.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from quintet.runs.fsync import OWNER, call_in_forked_children
from quintet.runs.successor import when_this_has_ended

STOP_TIMEOUT_S = 5.0
_SCRIPT = """\
directory=$1 owner=$2
shift 2
programs() {
    while read -r pid; do
        exe=$(readlink "/proc/$pid/exe")
        for program; do
            case $exe in "$program" | "$program"/*) echo "$pid" ;; esac
        done
    done
}
left() {
    {
        grep -lsF "$directory" /proc/[0-9]*/environ | cut -d/ -f3
        find /proc/[0-9]*/fd -lname "$directory/*" ! -lname "$directory/$owner*" ! -xtype d 2>/dev/null | cut -d/ -f3 | uniq | programs "$@"
    } | sort -u | grep -vx "$PPID"
}
tries=0
while [ $((tries += 1)) -le 100 ] && pids=$(left "$@"); do
    kill -9 $pids 2>/dev/null
    sleep 0.1
done
rm -rf "$directory"
"""


class Guardian:
    """A process that kills all others of a run, and removes its scratch directory, when this process ends, however it does, or at
    `finish`.

    To be made before the directory's name is in the environment. `programs`: what a run runs besides this process's own program,
    files or directories of them. It finds them where there is /proc; elsewhere it removes the directory alone.
    """

    def __init__(self, directory: Path, programs: Sequence[Path] = ()) -> None:
        known = [os.path.realpath(program) for program in (Path("/proc/self/exe"), *programs)]
        self._process = when_this_has_ended(_SCRIPT, "quintet-guardian", str(directory), OWNER, *known)
        assert self._process.stdin is not None
        self._alive = self._process.stdin
        call_in_forked_children(self._let_go)  # or it would wait for their end too

    def finish(self) -> None:
        """Kill what is left of the run, and wait for that."""
        self._let_go()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)

    def _let_go(self) -> None:
        self._alive.close()
