"""What ends a run's processes when the run itself no longer can: it was killed, and they do not all notice, or not soon.

Ray's own agents stay for a minute, a verifier in the middle of a computation for as long as that takes, a process that is stopped
for ever. So a shell waits for the end of this process, which closes its input, kills all that belongs to the run's scratch
directory, and removes that: what was started with the directory's name in its environment, and what has a file of it open (a process
that sets its title may write over its environment).
"""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

STOP_TIMEOUT_S = 5.0
_SCRIPT = """\
left() {
    { grep -lsF "$1" /proc/[0-9]*/environ; find /proc/[0-9]*/fd -lname "$1/*" 2>/dev/null; } | cut -d/ -f3 | sort -u | grep -vx "$PPID"
}
read _
tries=0
while [ $((tries += 1)) -le 100 ] && pids=$(left "$1"); do
    kill -9 $pids 2>/dev/null
    sleep 0.1
done
rm -rf "$1"
"""


class Guardian:
    """Kill all other processes of a run, and remove its scratch directory, when this process ends, however it does, or at `finish`.

    To be made before the directory's name is in the environment. It finds them where there is /proc; elsewhere it removes the
    directory alone.
    """

    def __init__(self, directory: Path) -> None:
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "quintet-guardian", str(directory)],
            stdin=subprocess.PIPE,
            stdout=quiet,
            stderr=quiet,
            start_new_session=True,  # Ctrl-C is not for it
        )

    def finish(self) -> None:
        """Kill what is left of the run, and wait for that."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=STOP_TIMEOUT_S)
