"""What is done when this process has ended, however it did."""

from __future__ import annotations

import subprocess


def when_this_has_ended(script: str, title: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a shell that runs the script once this process is gone, or has closed the shell's input. title: what the process list calls it;
    arguments: the script's $1 and so on."""
    return subprocess.Popen(
        ["/bin/sh", "-c", f"read _\n{script}", title, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,  # Ctrl-C is not for it
    )
