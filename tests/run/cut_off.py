"""A process that runs commands without a network, and writes down what asked for one.

    python -m tests.run.cut_off plan.json report.json

The plan is a list of commands. The report gives of each its exit status, what it printed, and the addresses and names
that were looked up or connected to meanwhile, by any thread; each such call fails. Telemetry is sent at the end, as
libraries do it, to see that this would have been noticed.
"""

import contextlib
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.utils import send_telemetry

from blockskip import cli

WATCHED = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.sendmsg")
#: Seconds that threads have to ask after a command.
GRACE = 0.1


def main(plan: Path, report: Path) -> None:
    """Run the plan's commands."""
    if huggingface_hub.constants.is_offline_mode():
        raise SystemExit("The hub's library is offline by itself, so nothing would be noticed.")
    asked: list[str] = []

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event in WATCHED and not (arguments and getattr(arguments[0], "family", None) == 1):  # AF_UNIX: this machine
            asked.append(f"{event} {arguments[1:] if event == 'socket.connect' else arguments}")
            raise OSError("there is no network")

    sys.addaudithook(refuse)
    found: list[dict[str, Any]] = []
    for command in json.loads(plan.read_text(encoding="utf-8")):
        asked.clear()
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
            status = cli.main(command)
        time.sleep(GRACE)
        found.append({"status": status, "asked": list(asked), "printed": printed.getvalue()})
    asked.clear()
    send_telemetry("control")
    for _ in range(100):
        time.sleep(0 if asked else GRACE)
    found.append({"status": 0, "asked": list(asked), "printed": ""})
    report.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
