"""Measure what each attack of `tests/hostile/attacks.py` does to its host: `python -m benchmarks.hostile [WORD ...]`.

With PYTHONPATH the host may be another version of toolcell, for a comparison.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from hostile.attacks import ATTACKS
from hostile.harness import COLUMNS, HostLost, measure


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile", description=__doc__)
    parser.add_argument("words", nargs="*", help="only attacks whose name contains one of these")
    parser.add_argument("--backend", default="process", choices=("process", "docker"))
    parser.add_argument("--all", action="store_true", help="every guest of an attack, not only the worst")
    parser.add_argument("--json", type=Path, help="write all figures here as well")
    options = parser.parse_args()
    print(f"{COLUMNS}\n|---{'|---:' * 8}|---|", flush=True)
    figures: dict[str, object] = {}
    for name, attack in ATTACKS.items():
        if not any(word in name for word in options.words or [""]):
            continue
        try:
            reports = measure(attack, options.backend)
        except HostLost as lost:
            print(f"| {name} | host lost: {lost} |", flush=True)
            figures[name] = str(lost)
            continue
        figures[name] = [dataclasses.asdict(each) for each in reports]
        worst = max(reports, key=lambda each: each.worked_s)
        for each in reports if options.all else [worst]:
            print(each.row(name), flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
