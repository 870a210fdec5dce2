"""`moaic cluster check`: looks at the hosts of `cluster.toml` before a program needs them."""

from __future__ import annotations

import argparse
import json
import os
import sys

from moaic.cli.exit_codes import WRONG


def check(chosen: argparse.Namespace) -> int:
    """Prints what was found on all hosts. Returns WRONG where a program could not use one of them."""
    from moaic.tools.cluster_report import checked, requested, to_data, to_text

    report = checked(requested(os.environ, chosen.folder), _say)
    print(json.dumps(to_data(report), indent=1) if chosen.json else to_text(report))
    return WRONG if report.problems else 0


def _say(text: str) -> None:
    print(f"moaic cluster check: {text}", file=sys.stderr, flush=True)
